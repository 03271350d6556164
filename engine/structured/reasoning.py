"""Thinking before the answer: between which tokens it stands. Free of torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Markers(NamedTuple):
    """How models write it that think; their chat templates know `start` and `end` as tokens of their own.

    `line_breaks` are what they write between the thinking and the answer, `label` what follows `start` and is no
    thought. `switch`: the token that has them think, where without it in their prompt they do not; `sign`: what the
    templates have too of some whose answers alone show the markers.
    """

    start: str
    end: str
    line_breaks: str = ""
    label: str = ""
    switch: str = ""
    sign: str = ""


MARKERS = (
    # Qwen3, DeepSeek-R1 and its distillations, SmolLM3, GLM.
    Markers("<think>", "</think>", "\n\n"),
    # Magistral, Mistral Small 4.
    Markers("[THINK]", "[/THINK]", sign="[MODEL_SETTINGS]"),
    # Seed-OSS.
    Markers("<seed:think>", "</seed:think>"),
    # Command A Reasoning.
    Markers("<|START_THINKING|>", "<|END_THINKING|>"),
    # Apertus.
    Markers("<|inner_prefix|>", "<|inner_suffix|>"),
    # Gemma 4.
    Markers("<|channel>", "<channel|>", label="thought\n", switch="<|think|>"),
)
# What chat templates know it by; the second are DeepSeek's and Granite's.
SWITCHES = ("enable_thinking", "thinking")
# A prompt that has begun the thinking, or has ended it, has no more after the marker than line breaks.
_MOST_AFTER_MARKER = 2


class ThinkingStage(Enum):
    """How far a prompt has come with the thinking. A chat template may begin it, or, told not to think, end it."""

    NOT_BEGUN = 0
    OPEN = 1
    DONE = 2


class Split(NamedTuple):
    """An answer's tokens: the thinking, and what follows it; `num_reasoning`: of the former, with its markers."""

    reasoning: tuple[int, ...]
    answer: tuple[int, ...]
    num_reasoning: int


@dataclass(frozen=True)
class ReasoningTokens:
    """Between which tokens a model thinks.

    `break_token_ids`: what stands after them where the answer is held to choices or a grammar, which leave no room for
    the line breaks that the model expects there. `label_token_ids`, `switch_token_id`: as in `Markers`.
    """

    start_token_id: int
    end_token_id: int
    break_token_ids: tuple[int, ...] = ()
    label_token_ids: tuple[int, ...] = ()
    switch_token_id: int | None = None

    @property
    def opening(self) -> tuple[int, ...]:
        """What begins the thinking."""
        return (self.start_token_id, *self.label_token_ids)

    @property
    def closing(self) -> tuple[int, ...]:
        """What ends it, with which alone an answer begins that is not held to anything."""
        return (self.end_token_id,)

    @property
    def barred(self) -> tuple[int, ...]:
        """What a model that is guided is not to write while it thinks."""
        return ()

    def tracker(self, prompt_token_ids: Sequence[int], is_held: bool = False) -> "ThinkingTracker":
        """For one answer, whose tokens come one after the other. `is_held`: as in `split`."""
        return ThinkingTracker(self, prompt_token_ids, is_held)

    def stage(self, prompt_token_ids: Sequence[int], is_guided: bool = False) -> ThinkingStage:
        """`is_guided`: what comes is held to something, and is not to begin with thinking that nobody has asked for."""
        for token in reversed(prompt_token_ids[-1 - max(_MOST_AFTER_MARKER, len(self.label_token_ids)) :]):
            if token == self.start_token_id:
                return ThinkingStage.OPEN
            if token == self.end_token_id:
                return ThinkingStage.DONE
        is_off = self.switch_token_id is not None and self.switch_token_id not in prompt_token_ids
        return ThinkingStage.DONE if is_guided and is_off else ThinkingStage.NOT_BEGUN

    def split(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int], is_held: bool = False) -> Split:
        """Part the tokens of an answer. One that ends before the thinking does is nothing but thinking.

        `is_held`: the answer is held to choices or a grammar; the break before it is of neither part.
        """
        tokens, stage = tuple(token_ids), self.stage(prompt_token_ids, is_held)
        if stage is ThinkingStage.DONE:
            return Split((), tokens, 0)
        # Line breaks may come before it.
        head = tokens[: 1 if stage is ThinkingStage.OPEN else 1 + _MOST_AFTER_MARKER]
        begins = self.start_token_id in head
        if stage is ThinkingStage.NOT_BEGUN and not begins:
            return Split((), tokens, 0)
        first = self._after_label(tokens, tokens.index(self.start_token_id) + 1) if begins else 0
        if self.end_token_id not in tokens[first:]:
            return Split(tokens[first:], (), len(tokens))
        end = tokens.index(self.end_token_id, first)
        begin = end + 1 + (len(self.break_token_ids) if is_held else 0)
        return Split(tokens[first:end], tokens[begin:], end + 1)

    def _after_label(self, tokens: tuple[int, ...], place: int) -> int:
        """`place`, or where the label ends that stands there, as far as there are tokens."""
        for label in self.label_token_ids:
            if tokens[place : place + 1] != (label,):
                break
            place += 1
        return place


class ThinkingTracker:
    """Says of an answer's tokens, one after the other, what `ReasoningTokens.split` says of all.

    `num_reasoning`: how many tokens came up to the last that was of the thinking. `is_between`: whether the newest is
    of the break before an answer that is held to choices or a grammar, `is_marker` whether it is of the thinking's
    beginning or its end.
    """

    def __init__(self, tokens: ReasoningTokens, prompt_token_ids: Sequence[int], is_held: bool = False) -> None:
        self._tokens = tokens
        self._is_held = is_held
        self.num_reasoning = 0
        self.is_between = False
        self.is_marker = False
        self._num_seen = 0
        stage = tokens.stage(prompt_token_ids, is_held)
        self._num_between = len(tokens.break_token_ids) if is_held and stage is not ThinkingStage.DONE else 0
        self.is_thinking = stage is ThinkingStage.OPEN
        # How many more tokens may begin it.
        self._num_left = 0 if stage is ThinkingStage.DONE else 1 + _MOST_AFTER_MARKER
        # What of the label may follow.
        self._label: tuple[int, ...] = ()

    def add(self, token_id: int) -> bool:
        """Whether the next token is of the thinking, its markers included."""
        self._num_left -= 1
        self._num_seen += 1
        self.is_marker = False
        if self._is_thought(token_id):
            self.num_reasoning = self._num_seen
            return True
        self.is_between = self._num_between > 0
        self._num_between -= 1
        return False

    def _is_thought(self, token_id: int) -> bool:
        if self.is_thinking:
            self.is_marker = token_id in (self._tokens.start_token_id, self._tokens.end_token_id, *self._label[:1])
            self._label = self._label[1:] if token_id in self._label[:1] else ()
            self.is_thinking = token_id != self._tokens.end_token_id
            if not self.is_thinking:
                self._num_left = 0
            return True
        if self._num_left >= 0 and token_id == self._tokens.start_token_id:
            self.is_thinking, self.is_marker, self._num_left = True, True, 0
            self._label = self._tokens.label_token_ids
            return True
        return False

    def beginning(self, text: str) -> str:
        """What of the answer's first text counts: blanks after the thinking do not, unless a grammar has them there."""
        return text if self._is_held else text.lstrip()
