"""The text of an answer while it grows: what each token adds, and nothing that may have to be taken back."""

from collections.abc import Sequence

from ...engine.text.detokenizer import Detokenizer
from ...engine.text.tokenizer import Tokenizer


class GrowingText:
    """Whole characters only, and nothing that may turn out to be the beginning of one of the `stops`.

    What was given out and, at the end, `owed` give the answer's text. (They differ from it where a model with byte
    fallback writes bytes that are no text: what such bytes decode to depends on those that follow.)
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = stops
        self._longest = max(map(len, stops), default=0)
        self._given: list[str] = []
        self._held = ""

    @property
    def held(self) -> str:
        """What is known of the text and was not given out."""
        return self._held

    def resume(self, token_ids: Sequence[int], texts: Sequence[str]) -> None:
        """Go on after these tokens, for which an earlier attempt gave out `texts`."""
        for token_id in token_ids:
            self.add(token_id)
        self._given = list(texts)

    def add(self, token_id: int) -> str:
        """What may be given out now that this token is known."""
        text = self._held + self._detokenizer.add(token_id)
        keep = self._num_held(text)
        self._held = text[len(text) - keep :]
        given = text[: len(text) - keep]
        self._given.append(given)
        return given

    def owed(self, answer: str) -> str:
        """What the whole answer has beyond what was given out."""
        given = "".join(self._given)
        return answer[len(given) :] if answer.startswith(given) else self._held

    def _num_held(self, text: str) -> int:
        """How many characters at the end of `text` a stop may begin with."""
        longest = min(self._longest - 1, len(text))
        return next((size for size in range(longest, 0, -1) if self._begins_a_stop(text[-size:])), 0)

    def _begins_a_stop(self, end: str) -> bool:
        return any(stop.startswith(end) for stop in self._stops)
