"""The text of an answer while it grows: what each token adds, and nothing that may have to be taken back."""

from collections.abc import Sequence

from ...engine.request import Request
from ...engine.structured.reasoning import ThinkingTracker
from ...engine.text.detokenizer import Detokenizer
from ...engine.text.tokenizer import Tokenizer


class GrowingText:
    """Whole characters only, and nothing that may turn out to be the beginning of one of the `stops`.

    What was given out and, at the end, `owed` give the answer's text. (They differ from it where a model with byte
    fallback writes bytes that are no text: what such bytes decode to depends on those that follow.) With `thinking`
    that comes before, between its markers, as the model writes them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        thinking: ThinkingTracker | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skips = skip_special_tokens
        self._detokenizer = Detokenizer(tokenizer, self._skips)
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._thinking = thinking
        # Of the answer, what was given out.
        self._given: list[str] = []
        self._held = ""

    @classmethod
    def of(cls, tokenizer: Tokenizer, request: Request) -> "GrowingText":
        """That of a request's answer."""
        tokens = request.reasoning
        is_held = request.params.holds_answer
        thinking = None if tokens is None else tokens.tracker(request.prompt_token_ids, is_held)
        return cls(tokenizer, request.params.stop_strings, thinking, request.params.skip_special_tokens)

    @property
    def held(self) -> str:
        """What is known of the text and was not given out."""
        return self._held

    @property
    def is_thinking(self) -> bool:
        """Whether the answer is still to come."""
        return self._thinking is not None and self._thinking.is_thinking

    def resume(self, token_ids: Sequence[int], texts: Sequence[str]) -> None:
        """Go on after these tokens, for which an earlier attempt gave out `texts`."""
        num_thought = 0
        for number, token_id in enumerate(token_ids, 1):
            self.add(token_id)
            if not self._given:
                num_thought = number
        self._given = list(texts[num_thought:])

    def add(self, token_id: int) -> str:
        """What may be given out now that this token is known."""
        if self._thinking is not None and self._thinking.add(token_id):
            return self._thought(token_id)
        if self._thinking is not None and self._thinking.is_between:
            self._given.append("")
            return ""
        text = self._held + self._detokenizer.add(token_id)
        if self._thinking is not None and not any(self._given):
            text = self._thinking.beginning(text)
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        given = text[: len(text) - keep]
        self._given.append(given)
        return given

    def _thought(self, token_id: int) -> str:
        # What came before has been no answer.
        self._given = []
        before, self._held = self._held, ""
        assert self._thinking is not None
        if not self._thinking.is_marker:
            return before + self._detokenizer.add(token_id)
        self._detokenizer = Detokenizer(self._tokenizer, self._skips)
        return before + self._tokenizer.marker(token_id)

    def owed(self, answer: str) -> str:
        """What the whole answer has beyond what was given out."""
        given = "".join(self._given)
        if self.is_thinking:
            return self._held
        return answer[len(given) :] if answer.startswith(given) else self._held

    def _num_held(self, text: str) -> int:
        """How many characters at the end of `text` a stop may begin with."""
        longest = min(self._longest - 1, len(text))
        return next((size for size in range(longest, 0, -1) if self._begins_a_stop(text[-size:])), 0)

    def _begins_a_stop(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)
