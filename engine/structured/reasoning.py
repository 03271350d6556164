"""Thinking before the answer: between which tokens it stands. Free of torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

# How the models write it that think: their chat templates know these as tokens of their own. With each what they write
# between the thinking and the answer.
MARKERS = (
    # Qwen3, DeepSeek-R1 and its distillations, SmolLM3, GLM.
    ("<think>", "</think>", "\n\n"),
    # Magistral.
    ("[THINK]", "[/THINK]", ""),
    # Seed-OSS.
    ("<seed:think>", "</seed:think>", ""),
    # Command A Reasoning.
    ("<|START_THINKING|>", "<|END_THINKING|>", ""),
)
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
    the line breaks that the model expects there.
    """

    start_token_id: int
    end_token_id: int
    break_token_ids: tuple[int, ...] = ()

    def stage(self, prompt_token_ids: Sequence[int]) -> ThinkingStage:
        for token in reversed(prompt_token_ids[-1 - _MOST_AFTER_MARKER :]):
            if token == self.start_token_id:
                return ThinkingStage.OPEN
            if token == self.end_token_id:
                return ThinkingStage.DONE
        return ThinkingStage.NOT_BEGUN

    def split(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int]) -> Split:
        """Part the tokens of an answer. One that ends before the thinking does is nothing but thinking."""
        tokens, stage = tuple(token_ids), self.stage(prompt_token_ids)
        if stage is ThinkingStage.DONE:
            return Split((), tokens, 0)
        # Line breaks may come before it.
        head = tokens[: 1 if stage is ThinkingStage.OPEN else 1 + _MOST_AFTER_MARKER]
        begins = self.start_token_id in head
        if stage is ThinkingStage.NOT_BEGUN and not begins:
            return Split((), tokens, 0)
        first = tokens.index(self.start_token_id) + 1 if begins else 0
        if self.end_token_id not in tokens[first:]:
            return Split(tokens[first:], (), len(tokens))
        end = tokens.index(self.end_token_id, first)
        return Split(tokens[first:end], tokens[end + 1 :], end + 1)


class ThinkingTracker:
    """Says of an answer's tokens, one after the other, what `ReasoningTokens.split` says of all."""

    def __init__(self, tokens: ReasoningTokens, prompt_token_ids: Sequence[int]) -> None:
        self._tokens = tokens
        stage = tokens.stage(prompt_token_ids)
        self.is_thinking = stage is ThinkingStage.OPEN
        # How many more tokens may begin it.
        self._num_left = 0 if stage is ThinkingStage.DONE else 1 + _MOST_AFTER_MARKER

    def add(self, token_id: int) -> bool:
        """Whether the next token is of the thinking, its markers included."""
        self._num_left -= 1
        if self.is_thinking:
            self.is_thinking = token_id != self._tokens.end_token_id
            if not self.is_thinking:
                self._num_left = 0
            return True
        if self._num_left >= 0 and token_id == self._tokens.start_token_id:
            self.is_thinking, self._num_left = True, 0
            return True
        return False
