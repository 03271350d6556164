"""What the offline face returns, with vLLM's names."""

from collections.abc import Sequence
from dataclasses import dataclass

from .detokenizer import answer_text
from .request import Request, RequestEvent
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class CompletionOutput:
    """One answer.

    With `SamplingParams.choices`, `probabilities` has each choice's. With `SamplingParams.logprobs`, `logprobs` has
    for each token a mapping of token ids to log-probabilities (its own first, then the likeliest), and
    `cumulative_logprob` is the sum of the tokens' own. Otherwise they are None.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    probabilities: dict[str, float] | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, float]] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt with its answers. `num_cached_tokens`: prompt tokens whose KV the first of them found cached."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool = True


def completion(tokenizer: Tokenizer, index: int, request: Request, events: Sequence[RequestEvent]) -> CompletionOutput:
    """The answer that a request's events, all of them, add up to."""
    last = events[-1]
    token_ids = tuple(token for event in events for token in event.new_token_ids)
    choices = request.params.choices
    if choices is not None and last.choice_probabilities is not None and last.choice_index is not None:
        probabilities = dict(zip(choices, last.choice_probabilities, strict=True))
        return CompletionOutput(index, choices[last.choice_index], token_ids, str(last.finish_reason), probabilities)
    logprobs = None
    if request.params.logprobs is not None:
        logprobs = [each for event in events for each in event.logprobs]
    return CompletionOutput(
        index=index,
        text=answer_text(tokenizer, request, token_ids, last.finish_reason),
        token_ids=token_ids,
        finish_reason=str(last.finish_reason),
        cumulative_logprob=None if logprobs is None else _own_sum(token_ids, logprobs),
        logprobs=logprobs,
    )


def _own_sum(token_ids: Sequence[int], logprobs: Sequence[dict[int, float]]) -> float:
    return sum(each[token] for token, each in zip(token_ids, logprobs, strict=True))
