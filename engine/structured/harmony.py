"""Thinking as gpt-oss writes it, in OpenAI's harmony format: in messages of their own, before the one that is final.

After a prompt that ends with `<|start|>assistant` an answer is
`<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>`. One that calls a tool
ends with a message to that instead: `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>`,
or with the recipient in front of the channel. Free of torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .reasoning import ReasoningTokens, Split, ThinkingStage, ThinkingTracker

CHANNEL, MESSAGE, START, END = "<|channel|>", "<|message|>", "<|start|>", "<|end|>"
ROLE, THOUGHT, ANSWER = "assistant", "analysis", "final"
# After it a header names whom its message is for; as it stands there, with the blank.
RECIPIENT = " to"
# What a prompt ends with whose answer begins at once.
ANSWER_HEADER = f"{CHANNEL}{ANSWER}{MESSAGE}"
# A header is much shorter, and with it ends a prompt that nobody has begun to think or to answer in.
_LONGEST_HEADER = 16


@dataclass(frozen=True)
class HarmonyTokens(ReasoningTokens):
    """`start_token_id` is `<|channel|>`, `end_token_id` `<|end|>`; the other fields are those of the other parts."""

    message_token_id: int = field(kw_only=True)
    begin_token_id: int = field(kw_only=True)
    role_token_ids: tuple[int, ...] = field(kw_only=True)
    thought_token_ids: tuple[int, ...] = field(kw_only=True)
    answer_token_ids: tuple[int, ...] = field(kw_only=True)
    recipient_token_ids: tuple[int, ...] = field(kw_only=True)

    @property
    def opening(self) -> tuple[int, ...]:
        return (self.start_token_id, *self.thought_token_ids, self.message_token_id)

    @property
    def closing(self) -> tuple[int, ...]:
        header = (self.start_token_id, *self.answer_token_ids, self.message_token_id)
        return (self.end_token_id, self.begin_token_id, *self.role_token_ids, *header)

    @property
    def barred(self) -> tuple[int, ...]:
        """A message has no header in it: with `<|end|>` the guide goes on to the final one."""
        return (self.start_token_id, self.message_token_id, self.begin_token_id)

    def stage(self, prompt_token_ids: Sequence[int], is_guided: bool = False) -> ThinkingStage:
        tail = list(prompt_token_ids[-_LONGEST_HEADER:])
        begin = max((place for place, token in enumerate(tail) if token == self.begin_token_id), default=0)
        headers, has_message = _Headers(self), False
        for token in tail[begin:]:
            has_message |= headers.add(token) and token == self.message_token_id
        if headers.is_answer:
            return ThinkingStage.DONE
        return ThinkingStage.OPEN if has_message and not headers.is_open else ThinkingStage.NOT_BEGUN

    def split(self, prompt_token_ids: Sequence[int], token_ids: Sequence[int], is_held: bool = False) -> Split:
        """As of others. What is written in any channel but the final one is thought, without the messages' headers.

        A message to a tool is an answer too, from behind the `RECIPIENT` of its header on: `=functions.NAME json{…}`.
        """
        tokens, tracker = tuple(token_ids), self.tracker(prompt_token_ids, is_held)
        reasoning: list[int] = []
        for place, token in enumerate(tokens):
            if not tracker.add(token):
                return Split(tuple(reasoning), tokens[place:], tracker.num_reasoning)
            if not tracker.is_marker:
                reasoning.append(token)
        return Split(tuple(reasoning), (), tracker.num_reasoning)

    def tracker(self, prompt_token_ids: Sequence[int], is_held: bool = False) -> "HarmonyTracker":
        return HarmonyTracker(self, prompt_token_ids, is_held)


class HarmonyTracker(ThinkingTracker):
    """See `ThinkingTracker`. Headers are of the thinking, that of the final message too."""

    def __init__(self, tokens: HarmonyTokens, prompt_token_ids: Sequence[int], is_held: bool = False) -> None:
        super().__init__(tokens, prompt_token_ids, is_held)
        self._channel = tokens.start_token_id
        self._headers = _Headers(tokens)
        self._is_answer = tokens.stage(prompt_token_ids) is ThinkingStage.DONE

    def _is_thought(self, token_id: int) -> bool:
        if not self._is_answer and not self.is_thinking:
            # What begins with no header is an answer as it stands.
            self.is_thinking = token_id == self._channel
            self._is_answer = not self.is_thinking
        if self._is_answer:
            return False
        self.is_marker = self._headers.add(token_id)
        self._is_answer = self._headers.is_answer
        self.is_thinking = not self._is_answer
        return True


class _Headers:
    """Reads what stands between messages. `is_open`: in a header; `is_answer`: the final message has begun.

    Or one to a tool has, whose header says to which.
    """

    def __init__(self, tokens: HarmonyTokens) -> None:
        self._tokens = tokens
        # Of the header, what follows its last special token.
        self._words: list[int] = []
        self.is_open = False
        self.is_answer = False

    def add(self, token_id: int) -> bool:
        """Whether the token is of a header, or ends a message."""
        tokens = self._tokens
        if token_id in (tokens.end_token_id, tokens.begin_token_id, tokens.start_token_id):
            self.is_open, self._words = True, []
            return True
        if not self.is_open:
            return False
        if token_id == tokens.message_token_id:
            self.is_open = False
            # The channel may be followed by the form of what is written.
            answer = tokens.answer_token_ids
            self.is_answer = tuple(self._words[: len(answer)]) == answer
            return True
        self._words.append(token_id)
        recipient = tokens.recipient_token_ids
        self.is_answer = tuple(self._words[-len(recipient) :]) == recipient
        return True
