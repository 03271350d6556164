"""A thinking model's answer in two: what it thought, and what it says then."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ....engine.errors import InvalidRequestError
from ....engine.structured.reasoning import ThinkingStage
from ....engine.text.tokenizer import Tokenizer
from ...spec.sampling import SamplingSpec
from ...streams.events import StreamEvent, ThoughtEvent


class ReasoningParser:
    """Parts a choice's events, one after the other, each once.

    `is_told`: whether what is thought is to be handed on. `is_held`: whether the answer is held to choices or a
    grammar, so that a break comes before it, of neither part.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], is_told: bool, is_held: bool) -> None:
        tokens = tokenizer.reasoning(True)
        assert tokens is not None
        self._thinking = tokens.tracker(prompt_token_ids, is_held)
        self.is_told = is_told
        self._has_begun = False
        # Blanks that nothing has followed yet.
        self._held = ""

    def add(self, event: StreamEvent) -> ThoughtEvent:
        are_thought, are_markers, are_said = [], [], []
        for token in event.token_ids:
            is_thought = self._thinking.add(token)
            are_thought.append(is_thought)
            are_markers.append(self._thinking.is_marker)
            are_said.append(not is_thought and not self._thinking.is_between)
        # Its end has a text without tokens.
        texts, are_texts_thought = (event.texts, are_thought) if are_thought else ((event.text,), [self.is_thinking])
        thought, said = [], []
        for index, (text, is_thought) in enumerate(zip(texts, are_texts_thought, strict=True)):
            if not is_thought:
                said.append(text)
            elif not are_thought or not are_markers[index]:
                thought.append(text)
        logprobs = event.logprobs
        if logprobs is not None:
            logprobs = tuple(each for each, is_said in zip(logprobs, are_said, strict=True) if is_said)
        given = {each.name: getattr(event, each.name) for each in fields(StreamEvent)}
        given |= {"text": "".join(said), "logprobs": logprobs}
        return ThoughtEvent(**given, reasoning=self._trimmed("".join(thought)))

    @property
    def num_tokens(self) -> int:
        """How many tokens the thinking took so far."""
        return self._thinking.num_reasoning

    @property
    def is_thinking(self) -> bool:
        """Whether what is said is still to come."""
        return self._thinking.is_thinking

    def _trimmed(self, text: str) -> str:
        """Without blanks in front of all, and at its end."""
        text = self._held + text if self._has_begun else text.lstrip()
        trimmed = text.rstrip()
        self._held = text[len(trimmed) :]
        self._has_begun |= bool(trimmed)
        return trimmed if self.is_told else ""


def with_reasoning(
    sampling: SamplingSpec,
    tokenizer: Tokenizer,
    told: Mapping[str, Any],
    include_reasoning: bool | None,
    thinking_token_budget: int | None,
    begun: str | None = None,
) -> SamplingSpec:
    """The sampling of a chat that says so, where its model thinks.

    Some clients send vLLM's default whatever the model, and it parts nothing of one that does not think. What is of no
    use unparted is parted where nothing is said. `told`: what the chat template is; `begun`: an answer that is gone on
    with, which is thought about no more unless it ends within the thinking. Raises `InvalidRequestError` where the
    thinking of a model that does not think is to be bounded.
    """
    if include_reasoning is None and thinking_token_budget is None and not tokenizer.parts_unasked(told):
        return sampling
    try:
        tokens = tokenizer.reasoning(True)
    except InvalidRequestError as error:
        if thinking_token_budget is None:
            return sampling
        raise InvalidRequestError(f"thinking_token_budget: {error}", "thinking_token_budget") from error
    assert tokens is not None
    if begun is not None and tokens.stage(tokenizer.encode(begun, add_special_tokens=False)) is not ThinkingStage.OPEN:
        return sampling
    return sampling.model_copy(update={"reasoning": True, "thinking_token_budget": thinking_token_budget})
