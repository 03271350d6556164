"""What rows and streams tell of the engine's answer, in plain values: its text, what stopped it, log-probabilities."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from ...engine.checkpoints.model_config import ModelConfig
from ...engine.logprobs import Logprob, TokenLogprobs
from ...engine.request import Request
from ...engine.text.finished_answer import answer_text, decoded, end_token_id, stop_reason
from ...engine.text.tokenizer import Tokenizer
from .outcomes import Answer


def text_of(tokenizer: Tokenizer, request: Request, answer: Answer) -> str:
    """Without what was thought before; a choice as it was given."""
    choices, index = request.params.choices, answer.choice_index
    if choices is not None and index is not None:
        return choices[index]
    return answer_text(tokenizer, request, answer.token_ids, answer.finish_reason)


def stop_reason_of(tokenizer: Tokenizer, request: Request, answer: Answer) -> str | int | None:
    """Which text or token has stopped it, as vLLM's server tells it.

    None where it was the model's end, a limit, or a choice. Raises `ModelError` where the model is gone.
    """
    if request.params.choices is not None:
        return None
    return stop_reason(request, answer.token_ids, answer.finish_reason, _end_token_id(tokenizer))


@lru_cache(maxsize=4)
def _end_token_id(tokenizer: Tokenizer) -> int | None:
    return end_token_id(tokenizer, ModelConfig.from_pretrained(tokenizer.folder).eos_token_ids)


def logprob_entries(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int
) -> list[dict[str, Any]]:
    """Log-probabilities, one entry a token: itself, and under `top` the `num_top` likeliest in its place, in order."""
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
