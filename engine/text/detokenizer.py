"""Token ids to text while an answer grows: whole characters only, and where a stop string ends it."""

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from ..request import FinishReason, Request, SamplingParams
from .tokenizer import Tokenizer

# What decoders put where bytes make no character (yet).
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of a growing answer, piece by piece, special tokens left out."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._fast = tokenizer.fast
        self._stream = DecodeStream(skip_special_tokens=True)

    def add(self, token_id: int) -> str:
        """What this token makes known of the text: nothing while a character lacks bytes."""
        try:
            return self._stream.step(self._fast, token_id) or ""
        # The Rust side raises bare Exception.
        except Exception as error:
            # A text it gave out decodes differently with more tokens: only invalid UTF-8 does that. Start afresh.
            if not str(error).startswith("Invalid prefix encountered"):
                raise
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(self._fast, token_id) or ""


class StopStrings:
    """A request's `stop_checker` for the texts of `params.stop`.

    The answer ends where the first stop string is complete, counted in characters: how the tokens cut the text makes
    no difference.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._params = params
        self._stops = params.stop_strings
        self._num_tokens = 0
        self._pieces: list[str] = []
        # The end of the text so far, as much as a stop string may begin with.
        self._tail = ""
        # The answer's text once a stop string has ended it.
        self.answer: str | None = None

    @classmethod
    def of(cls, tokenizer: Tokenizer, params: SamplingParams) -> "StopStrings | None":
        """The checker these parameters need, if any."""
        return cls(tokenizer, params) if params.stop_strings else None

    def __call__(self, token_id: int) -> bool:
        self._num_tokens += 1
        self._pieces.append(self._detokenizer.add(token_id))
        num_seen, text = len(self._tail), self._tail + self._pieces[-1]
        may_stop = self._num_tokens > self._params.min_tokens
        found = first_stop(text, self._stops, num_seen) if may_stop else None
        if found is None:
            self._tail = text[max(0, len(text) + 1 - max(map(len, self._stops))) :]
            return False
        begin, end = found
        surplus = len(text) - (end if self._params.include_stop_str_in_output else begin)
        whole = "".join(self._pieces)
        self.answer = whole[: len(whole) - surplus]
        return True


def first_stop(text: str, stops: Sequence[str], num_seen: int = 0) -> tuple[int, int] | None:
    """Where in `text` the stop string begins and ends that is complete first, if one is.

    Those complete within the first `num_seen` characters are not looked at. Of two that end together the longer counts.
    """
    found = []
    for stop in stops:
        begin = text.find(stop, max(0, num_seen - len(stop) + 1))
        if begin >= 0:
            found.append((begin + len(stop), begin))
    if not found:
        return None
    end, begin = min(found)
    return begin, end


def answer_text(
    tokenizer: Tokenizer, request: Request, token_ids: Sequence[int], finish_reason: FinishReason | None
) -> str:
    """The text of a finished answer: up to its stop, and without a last character that was cut in half."""
    checker, params = request.stop_checker, request.params
    if isinstance(checker, StopStrings) and checker.answer is not None:
        return checker.answer
    # It was a token that ended it, one of the request's or the model's; not every tokenizer knows that as special.
    if finish_reason is FinishReason.STOP and not params.include_stop_str_in_output:
        token_ids = token_ids[:-1]
    text = tokenizer.decode(token_ids)
    return text.rstrip(_REPLACEMENT) if finish_reason is FinishReason.LENGTH else text
