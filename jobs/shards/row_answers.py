"""A row's answers as output columns."""

import json
from collections.abc import Sequence
from math import log
from typing import Any

from ...engine.request import Request
from ...engine.text.finished_answer import num_reasoning_tokens, num_tokens_before, reasoning_text
from ...engine.text.tokenizer import Tokenizer
from ..hosting.answer_values import logprob_entries, prompt_logprob_entries, stop_reason_of, text_of
from ..hosting.outcomes import Answer

Answered = tuple[Request, Answer]


def answer_columns(
    tokenizer: Tokenizer, samples: Sequence[Answered], with_all_answers: bool = False, chosen: int = 0
) -> dict[str, Any]:
    """The columns of a row that was answered, once or several times; `output` and its like are the `chosen` answer's.

    `with_all_answers`: also what stopped each, and of several how each ended, and each one's log-probabilities and
    thinking.
    """
    (request, answer), (_, first) = samples[chosen], samples[0]
    num_prompt_tokens = len(request.prompt_token_ids)
    columns: dict[str, Any] = {
        "output": text_of(tokenizer, request, answer),
        "finish_reason": answer.finish_reason.value,
        "prompt_tokens": num_prompt_tokens,
        # Of an answer that was resumed, tokens of its own may be cached too.
        "cached_tokens": min(first.num_cached_tokens, num_prompt_tokens),
        "completion_tokens": len(answer.token_ids),
    }
    if request.params.choices is not None:
        columns |= _label(request, answer)
    if request.reasoning is not None:
        columns["reasoning"] = _reasoning(tokenizer, request, answer)
        columns["reasoning_tokens"] = sum(num_reasoning_tokens(each, its.token_ids) for each, its in samples)
    if len(samples) > 1:
        columns["outputs"] = [text_of(tokenizer, *sample) for sample in samples]
        columns["completion_tokens"] = sum(len(each.token_ids) for _, each in samples)
    num_top = request.params.logprobs
    if num_top is not None:
        columns["logprobs"] = _logprobs(tokenizer, request, answer, num_top)
    if first.prompt_logprobs is not None:
        columns["prompt_logprobs"] = prompt_logprob_entries(tokenizer, request, first.prompt_logprobs)
    if with_all_answers:
        reasons = [stop_reason_of(tokenizer, *sample) for sample in samples]
        if any(reason is not None for reason in reasons):
            columns["stop_reasons"] = [None if reason is None else json.dumps(reason) for reason in reasons]
    if with_all_answers and len(samples) > 1:
        columns["finish_reasons"] = [str(each.finish_reason) for _, each in samples]
        if num_top is not None:
            columns["outputs_logprobs"] = [_logprobs(tokenizer, *sample, num_top) for sample in samples]
        if request.reasoning is not None:
            columns["outputs_reasoning"] = [_reasoning(tokenizer, *sample) for sample in samples]
    return columns


def error_columns(error: str, num_prompt_tokens: int) -> dict[str, Any]:
    """The columns of a row that has no answer."""
    return {"error": error, "prompt_tokens": num_prompt_tokens, "cached_tokens": 0, "completion_tokens": 0}


def _reasoning(tokenizer: Tokenizer, request: Request, answer: Answer) -> str | None:
    return reasoning_text(tokenizer, request, answer.token_ids, answer.finish_reason)


def _logprobs(tokenizer: Tokenizer, request: Request, answer: Answer, num_top: int) -> list[dict[str, Any]]:
    """Of the tokens of what is said, after the thinking and the break."""
    begin = num_tokens_before(request, answer.token_ids)
    return logprob_entries(tokenizer, answer.token_ids[begin:], answer.logprobs[begin:], num_top)


def _label(request: Request, answer: Answer) -> dict[str, Any]:
    """How sure the model is: of the label, of it against its nearest rival, and over all choices (entropy in nats)."""
    choices, probabilities, index = request.params.choices, answer.choice_probabilities, answer.choice_index
    if choices is None or probabilities is None or index is None:
        return {}
    *_, second, best = sorted((0.0, *probabilities))
    return {
        "label": choices[index],
        "confidence": probabilities[index],
        "margin": best - second,
        "entropy": sum([-each * log(each) for each in probabilities if each > 0]),
        "probabilities": dict(zip(choices, probabilities, strict=True)),
    }
