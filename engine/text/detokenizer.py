"""Token ids to text while an answer grows: whole characters only, and where a stop string ends it."""

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from ..sampling_params import SamplingParams
from ..structured.reasoning import ThinkingTracker
from .tokenizer import Tokenizer


class Detokenizer:
    """The text of a growing answer, piece by piece, special tokens left out unless they are not to be."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._fast = tokenizer.fast
        hidden = tokenizer.hidden_token_ids if skip_special_tokens else ()
        self._hidden = hidden or ()
        self._skips = hidden is None
        self._stream = DecodeStream(skip_special_tokens=self._skips)

    def add(self, token_id: int) -> str:
        """What this token makes known of the text: nothing while a character lacks bytes."""
        if token_id in self._hidden:
            return ""
        try:
            return self._stream.step(self._fast, token_id) or ""
        # The Rust side raises bare Exception.
        except Exception as error:
            # A text it gave out decodes differently with more tokens: only invalid UTF-8 does that. Start afresh.
            if not str(error).startswith("Invalid prefix encountered"):
                raise
            self._stream = DecodeStream(skip_special_tokens=self._skips)
            return self._stream.step(self._fast, token_id) or ""


class StopStrings:
    """A request's `stop_checker` for the texts of `params.stop`.

    The answer ends where the first stop string is complete, counted in characters: how the tokens cut the text makes
    no difference. What the model thinks before, as `thinking` tells, does not count.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, thinking: ThinkingTracker | None = None) -> None:
        self._thinking = thinking
        self._detokenizer = Detokenizer(tokenizer, params.skip_special_tokens)
        self._params = params
        self._stops = params.stop_strings
        self._num_tokens = 0
        self._pieces: list[str] = []
        # The end of the text so far, as much as a stop string may begin with.
        self._tail = ""
        # The answer's text once a stop string has ended it, and which one.
        self.answer: str | None = None
        self.found: str | None = None

    @classmethod
    def of(
        cls, tokenizer: Tokenizer, params: SamplingParams, prompt_token_ids: Sequence[int] = ()
    ) -> "StopStrings | None":
        """The checker these parameters need, if any. `prompt_token_ids`: wanted where they ask for reasoning."""
        if not params.stop_strings:
            return None
        tokens = tokenizer.reasoning(params.reasoning)
        thinking = None if tokens is None else tokens.tracker(prompt_token_ids, params.holds_answer)
        return cls(tokenizer, params, thinking)

    def __call__(self, token_id: int) -> bool:
        self._num_tokens += 1
        if not self._takes(token_id):
            return False
        num_seen, text = len(self._tail), self._tail + self._pieces[-1]
        may_stop = self._num_tokens > self._params.min_tokens
        found = first_stop(text, self._stops, num_seen) if may_stop else None
        if found is None:
            self._tail = text[max(0, len(text) + 1 - max(map(len, self._stops))) :]
            return False
        begin, end = found
        surplus = len(text) - (end if self._params.include_stop_str_in_output else begin)
        whole = "".join(self._pieces)
        self.answer, self.found = whole[: len(whole) - surplus], text[begin:end]
        return True

    def _takes(self, token_id: int) -> bool:
        """Add the token's text; whether it has any of the answer."""
        thinking = self._thinking
        if thinking is not None and (thinking.add(token_id) or thinking.is_between):
            return False
        piece = self._detokenizer.add(token_id)
        if thinking is not None and not self._pieces:
            piece = thinking.beginning(piece)
        if piece:
            self._pieces.append(piece)
        return bool(piece)


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
