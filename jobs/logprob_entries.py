"""Log-probabilities as rows and streams carry them: an entry a token, in plain values."""

from collections.abc import Sequence
from typing import Any

from ..engine.logprobs import Logprob, TokenLogprobs
from ..engine.request import Request
from ..engine.text.finished_answer import decoded
from ..engine.text.tokenizer import Tokenizer


def logprob_entries(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int
) -> list[dict[str, Any]]:
    """One entry a token: the token itself, and under `top` the `num_top` likeliest in its place, in their order."""
    entries = []
    for own, place in zip(token_ids, decoded(tokenizer, logprobs), strict=True):
        top = sorted((each.rank, token) for token, each in place.items() if each.rank <= num_top)
        entries.append({**_token(own, place[own]), "top": [_token(token, place[token]) for _, token in top]})
    return entries


def prompt_logprob_entries(
    tokenizer: Tokenizer, request: Request, logprobs: Sequence[TokenLogprobs | None]
) -> list[dict[str, Any]]:
    """Likewise one entry a token of the prompt. Nothing comes before the first: its `logprob` is None, `top` empty."""
    first, *others = request.prompt_token_ids
    known = [each for each in logprobs if each is not None]
    (text,) = tokenizer.decode_each([first])
    begin = {"token": text, "token_id": first, "logprob": None, "top": []}
    return [begin, *logprob_entries(tokenizer, others, known, request.params.prompt_logprobs or 0)]


def _token(token_id: int, logprob: Logprob) -> dict[str, Any]:
    return {"token": logprob.decoded_token, "token_id": token_id, "logprob": logprob.logprob}
