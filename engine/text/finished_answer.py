"""What the tokens of a finished answer say: its text, what was thought before, and what has stopped it."""

from collections.abc import Sequence
from dataclasses import replace

from ..logprobs import Logprob, TokenLogprobs
from ..request import FinishReason, Request
from .detokenizer import StopStrings
from .tokenizer import Tokenizer

# What decoders put where bytes make no character.
_REPLACEMENT = "\ufffd"


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
