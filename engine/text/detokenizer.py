"""Token ids to text while an answer grows: whole characters only, and where a stop string ends it."""

from collections.abc import Sequence
from dataclasses import replace

from tokenizers.decoders import DecodeStream

from ..logprobs import Logprob, TokenLogprobs
from ..request import FinishReason, Request, SamplingParams
from ..structured.reasoning import ThinkingTracker
from .tokenizer import Tokenizer

# What decoders put where bytes make no character (yet).
_REPLACEMENT = "\ufffd"


class Detokenizer:
    """The text of a growing answer, piece by piece, special tokens left out unless they are not to be."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._fast = tokenizer.fast
        self._skips = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)

    def add(self, token_id: int) -> str:
        """What this token makes known of the text: nothing while a character lacks bytes."""
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


def answer_text(
    tokenizer: Tokenizer, request: Request, token_ids: Sequence[int], finish_reason: FinishReason | None
) -> str:
    """The text of a finished answer: up to its stop, and without a last character that was cut in half.

    Empty where the request wants none (`detokenize`). What the model thought before is left out, where the request asks
    for that, with the line breaks that follow it.
    """
    if not request.params.detokenize:
        return ""
    checker = request.stop_checker
    if isinstance(checker, StopStrings) and checker.answer is not None:
        return checker.answer
    token_ids, skips = _without_stop(request, token_ids, finish_reason), request.params.skip_special_tokens
    if request.reasoning is None:
        return _whole(tokenizer.decode(token_ids, skips), finish_reason)
    is_held = request.params.holds_answer
    answer = request.reasoning.split(request.prompt_token_ids, token_ids, is_held).answer
    text = _whole(tokenizer.decode(answer, skips), finish_reason)
    return text if is_held else text.lstrip()


def reasoning_text(
    tokenizer: Tokenizer, request: Request, token_ids: Sequence[int], finish_reason: FinishReason | None
) -> str | None:
    """What the model thought before it gave a finished answer; None where the request does not ask."""
    if request.reasoning is None or not request.params.detokenize:
        return None
    if request.params.choices is None:
        token_ids = _without_stop(request, token_ids, finish_reason)
    thought = request.reasoning.split(request.prompt_token_ids, token_ids).reasoning
    # A budget may have cut its last character in half.
    return tokenizer.decode(thought, request.params.skip_special_tokens).rstrip(_REPLACEMENT).strip()


def decoded(tokenizer: Tokenizer | None, logprobs: Sequence[TokenLogprobs]) -> list[dict[int, Logprob]]:
    """The same with each token's text, if there is a tokenizer."""
    if tokenizer is None:
        return [dict(each) for each in logprobs]
    tokens = list({token for each in logprobs for token in each})
    text_of = dict(zip(tokens, tokenizer.decode_each(tokens), strict=True))
    return [
        {token: replace(logprob, decoded_token=text_of[token]) for token, logprob in each.items()} for each in logprobs
    ]


def num_reasoning_tokens(request: Request, token_ids: Sequence[int]) -> int:
    """How many of an answer's tokens, its first, the model thought; none where the request does not ask."""
    if request.reasoning is None:
        return 0
    return request.reasoning.split(request.prompt_token_ids, token_ids).num_reasoning


def num_tokens_before(request: Request, token_ids: Sequence[int]) -> int:
    """How many of a finished answer's tokens, its first, are no part of what it says: the thinking, and the break."""
    if request.reasoning is None:
        return 0
    split = request.reasoning.split(request.prompt_token_ids, token_ids, request.params.holds_answer)
    return len(token_ids) - len(split.answer)


def end_token_id(tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> int | None:
    """Which of a model's end tokens is no `stop_reason`: its tokenizer's, where that is one of them, else the first."""
    own = tokenizer.eos_token_id
    return own if own in eos_token_ids else next(iter(eos_token_ids), None)


def stop_reason(
    request: Request, token_ids: Sequence[int], finish_reason: FinishReason | None, end_token_id: int | None
) -> str | int | None:
    """Which text or token has stopped a finished answer; None where it was `end_token_id`, or something else.

    The end of a form is none, whichever of the model's end tokens it has; and where the request ignores those,
    `end_token_id` is a stop like others.
    """
    checker = request.stop_checker
    if isinstance(checker, StopStrings) and checker.found is not None:
        return checker.found
    if finish_reason is not FinishReason.STOP or not token_ids:
        return None
    params, last = request.params, token_ids[-1]
    if last == end_token_id and not params.ignore_eos:
        return None
    return last if last in params.stop_token_ids or not params.holds_answer else None


def _without_stop(request: Request, token_ids: Sequence[int], finish_reason: FinishReason | None) -> Sequence[int]:
    # It was a token that ended it, one of the request's or the model's; not every tokenizer knows that as special.
    ends_with_token = finish_reason is FinishReason.STOP
    return token_ids[:-1] if ends_with_token and not request.params.include_stop_str_in_output else token_ids


def _whole(text: str, finish_reason: FinishReason | None) -> str:
    return text.rstrip(_REPLACEMENT) if finish_reason is FinishReason.LENGTH else text
