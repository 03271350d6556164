"""What a step's logits say: a token for each sequence that generates, scores for each that reached a choice."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..kernels.sampling import likeliest_tokens
from .live_request import LiveRequest
from .logprobs import TokenLogprobs
from .sampler import LogprobRow, SampleRow, sample, score_choices, token_logprobs
from .sequence import Sequence

# A row of the logits, and whose token is drawn from it.
_Sampled = tuple[int, LiveRequest, Sequence]


class DrawnToken(NamedTuple):
    """`logprobs`: one entry where the request asks for them."""

    live: LiveRequest
    sequence: Sequence
    token: int
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """`scores`: the log-probabilities of a choice node's children. `broken`: whose logits are not finite."""

    drawn: list[DrawnToken]
    scores: list[tuple[Sequence, list[float]]]
    broken: list[Sequence]


def read_logits(logits: Tensor, ended: SequenceOf[Sequence], requests: Mapping[str, LiveRequest]) -> StepResult:
    """Sample and score. Changes nothing, so that a step that raises here can be undone.

    logits: [n, vocab], one row for each of `ended`. From a prompt's row its followers draw their first tokens too.
    """
    likeliest = likeliest_tokens(logits)
    # A NaN anywhere, or nothing but infinities, shows in a row's largest logit.
    finite = likeliest.are_finite.tolist()
    sampled: list[_Sampled] = []
    scored: list[tuple[int, Sequence]] = []
    for row, sequence in enumerate(ended):
        if not finite[row]:
            continue
        if sequence.choice_node is not None:
            scored.append((row, sequence))
            continue
        live = requests[sequence.request_id]
        sampled.append((row, live, sequence))
        if live.followers:
            sampled += [(row, follower, follower.sequences[0]) for follower in live.followers]
    return StepResult(
        drawn=_draw(logits, likeliest.tokens, sampled) if sampled else [],
        scores=_score(logits, scored) if scored else [],
        broken=[sequence for sequence, is_finite in zip(ended, finite, strict=True) if not is_finite],
    )


def _draw(logits: Tensor, likeliest: Tensor, sampled: SequenceOf[_Sampled]) -> list[DrawnToken]:
    rows = [row for row, _, _ in sampled]
    # Mostly every row is sampled once: no copy then.
    if rows != list(range(len(logits))):
        logits, likeliest = logits[rows], likeliest[rows]
    tokens = sample(logits, [_sample_row(live, sequence) for _, live, sequence in sampled], likeliest)
    logprobs = _logprobs(logits, sampled, tokens)
    return [
        DrawnToken(live, sequence, token, logprobs.get(index, ()))
        for index, ((_, live, sequence), token) in enumerate(zip(sampled, tokens, strict=True))
    ]


def _sample_row(live: LiveRequest, sequence: Sequence) -> SampleRow:
    adjustment = live.adjustment and live.adjustment.after(sequence.token_ids)
    return SampleRow(live.request.params, live.seed, sequence.num_output_tokens, adjustment)


def _logprobs(
    logits: Tensor, sampled: SequenceOf[_Sampled], tokens: SequenceOf[int]
) -> dict[int, tuple[TokenLogprobs]]:
    """Log-probabilities, by index, for those that ask."""
    asked = {
        index: LogprobRow(token, live.request.params.logprobs, live.request.logprobs_temperature)
        for index, ((_, live, _), token) in enumerate(zip(sampled, tokens, strict=True))
        if live.request.params.logprobs is not None
    }
    if not asked:
        return {}
    found = token_logprobs(logits[list(asked)], list(asked.values()))
    return {index: (each,) for index, each in zip(asked, found, strict=True)}


def _score(logits: Tensor, scored: SequenceOf[tuple[int, Sequence]]) -> list[tuple[Sequence, list[float]]]:
    nodes = [sequence.choice_node for _, sequence in scored if sequence.choice_node is not None]
    scores = score_choices(logits[[row for row, _ in scored]], nodes)
    return [(sequence, score) for (_, sequence), score in zip(scored, scores, strict=True)]
