"""What the offline face returns, with vLLM's names."""

from collections.abc import Sequence
from dataclasses import dataclass

from ..logprobs import Logprob
from ..request import Request, RequestEvent
from ..text.finished_answer import answer_text, decoded, reasoning_text, stop_reason
from ..text.tokenizer import Tokenizer


@dataclass(frozen=True)
class CompletionOutput:
    """One answer.

    With `SamplingParams.choices`, `probabilities` has each choice's. With `SamplingParams.logprobs`, `logprobs` has
    for each token a mapping of token ids to `Logprob` (its own first, then the likeliest), and `cumulative_logprob`
    is the sum of the tokens' own. Otherwise they are None. `stop_reason`: which text of the request's, or which token,
    has stopped the answer; None where it was the tokenizer's end token. With `SamplingParams.reasoning`, `reasoning` is
    what the model thought before, which `text` leaves out. `error` says what went wrong where `finish_reason` is
    "error".
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    probabilities: dict[str, float] | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None
    reasoning: str | None = None
    stop_reason: str | int | None = None

    def finished(self) -> bool:
        return True


@dataclass(frozen=True)
class RequestOutput:
    """A prompt with its answers.

    `num_cached_tokens`: prompt tokens whose KV the first of them found cached. With `SamplingParams.prompt_logprobs`,
    `prompt_logprobs` has for each prompt token what `CompletionOutput.logprobs` has for an answer's, but None for the
    first.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


def completion(
    tokenizer: Tokenizer,
    index: int,
    request: Request,
    events: Sequence[RequestEvent],
    end_token_id: int | None = None,
) -> CompletionOutput:
    """The answer that a request's events, all of them, add up to. `end_token_id`: the one that is nobody's stop."""
    last = events[-1]
    token_ids = tuple(token for event in events for token in event.new_token_ids)
    choices = request.params.choices
    reasoning = reasoning_text(tokenizer, request, token_ids, last.finish_reason)
    if choices is not None and last.choice_probabilities is not None and last.choice_index is not None:
        probabilities = dict(zip(choices, last.choice_probabilities, strict=True))
        text, reason = choices[last.choice_index], str(last.finish_reason)
        return CompletionOutput(index, text, token_ids, reason, probabilities, reasoning=reasoning)
    logprobs = None
    if request.params.logprobs is not None:
        told = [each for event in events for each in event.logprobs]
        logprobs = decoded(tokenizer if request.params.detokenize else None, told)
    return CompletionOutput(
        index=index,
        text=answer_text(tokenizer, request, token_ids, last.finish_reason),
        token_ids=token_ids,
        finish_reason=str(last.finish_reason),
        cumulative_logprob=None if logprobs is None else _own_sum(token_ids, logprobs),
        logprobs=logprobs,
        error=last.error,
        reasoning=reasoning,
        stop_reason=stop_reason(request, token_ids, last.finish_reason, end_token_id),
    )


def prompt_logprobs(
    tokenizer: Tokenizer | None, events: Sequence[RequestEvent]
) -> list[dict[int, Logprob] | None] | None:
    """What a request's events say of its prompt's tokens; None where it did not ask."""
    for event in events:
        if event.prompt_logprobs is not None:
            known = [each for each in event.prompt_logprobs if each is not None]
            return [None, *decoded(tokenizer, known)]
    return None


def _own_sum(token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob]]) -> float:
    return sum(each[token].logprob for token, each in zip(token_ids, logprobs, strict=True))
