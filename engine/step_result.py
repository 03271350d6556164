"""What a step's logits say: a token for each sequence that generates, scores for each that reached a choice."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..kernels.sampling import likeliest_tokens
from .live_request import LiveRequest
from .logprobs import TokenLogprobs
from .sampler import (
    LogprobQuery,
    ReportedLogprobs,
    SampleRow,
    launch_logprobs,
    launch_sample,
    read_logprobs,
    score_choices,
)
from .sequence import Sequence
from .transfer import Readback, to_device


class SampledRow(NamedTuple):
    """A row of the logits, and whose token is drawn from it. `leader`: from whose prompt it is the follower's."""

    row: int
    live: LiveRequest
    sequence: Sequence
    leader: LiveRequest | None = None


class DrawnToken(NamedTuple):
    """`logprobs`: one entry where the request asks for them. `leader`: as `SampledRow` has it."""

    live: LiveRequest
    sequence: Sequence
    token: int
    logprobs: tuple[TokenLogprobs, ...]
    leader: LiveRequest | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """`scores`: the log-probabilities of a choice node's children. `broken`: whose logits are not finite."""

    drawn: list[DrawnToken]
    scores: list[tuple[Sequence, list[float]]]
    broken: list[Sequence]


@dataclass(frozen=True, slots=True)
class LaunchedResult:
    """A step's result while it is computed. `sampled`: whose tokens `tokens` ([n] int64, on the device) are.

    `scored`: rows of `score_logits`, kept where there are such, that are a choice's. `asked`: which of the sampled
    want log-probabilities.
    """

    ended: SequenceOf[Sequence]
    sampled: SequenceOf[SampledRow]
    tokens: Tensor
    scored: SequenceOf[tuple[int, Sequence]]
    score_logits: Tensor | None
    asked: SequenceOf[int]
    reported: SequenceOf[ReportedLogprobs]
    _readback: Readback

    @classmethod
    def of(cls, logits: Tensor, ended: SequenceOf[Sequence], requests: Mapping[str, LiveRequest]) -> "LaunchedResult":
        """Sample. Changes nothing and waits for nothing, so that a step that raises here can be undone.

        logits: [n, vocab], one row for each of `ended`. From a prompt's row its followers draw their first tokens too.
        """
        likeliest = likeliest_tokens(logits)
        sampled: list[SampledRow] = []
        scored: list[tuple[int, Sequence]] = []
        for row, sequence in enumerate(ended):
            if sequence.choice_node is not None:
                scored.append((row, sequence))
                continue
            live = requests[sequence.request_id]
            sampled.append(SampledRow(row, live, sequence))
            if live.followers:
                sampled += [SampledRow(row, each, each.sequences[0], live) for each in live.followers]
        rows, tokens = _sampled_rows(logits, likeliest.tokens, sampled)
        asked = [index for index, each in enumerate(sampled) if each.live.request.params.logprobs is not None]
        reported = _launch_logprobs(rows, tokens, sampled, asked) if asked else []
        # One copy: a NaN anywhere, or nothing but infinities, shows in a row's largest logit.
        told = torch.cat([tokens, likeliest.are_finite.long()])
        readback = Readback([told, *(each for part in reported for each in part.tensors)])
        return cls(ended, sampled, tokens, scored, logits if scored else None, asked, reported, readback)

    def read(self) -> StepResult:
        """Wait for it. Changes nothing."""
        told, *reported = self._readback.wait()
        finite = told[len(self.sampled) :]
        logprobs = dict(zip(self.asked, read_logprobs(self.reported, reported, len(self.asked)), strict=True))
        scored = [(row, sequence) for row, sequence in self.scored if finite[row]]
        return StepResult(
            drawn=[
                DrawnToken(live, sequence, token, (logprobs[index],) if index in logprobs else (), leader)
                for index, ((row, live, sequence, leader), token) in enumerate(zip(self.sampled, told, strict=False))
                if finite[row]
            ],
            scores=_score(self.score_logits, scored) if self.score_logits is not None and scored else [],
            broken=[sequence for sequence, is_finite in zip(self.ended, finite, strict=True) if not is_finite],
        )


def _sampled_rows(logits: Tensor, likeliest: Tensor, sampled: SequenceOf[SampledRow]) -> tuple[Tensor, Tensor]:
    """The logits that tokens are drawn from, a row a token, and the tokens: of rows that are not finite, some."""
    rows = [each.row for each in sampled]
    # Mostly every row is sampled once: no copy then.
    if rows != list(range(len(logits))):
        index = to_device(rows, logits.device)
        logits, likeliest = logits[index], likeliest[index]
    tokens = launch_sample(logits, [_sample_row(each.live, each.sequence) for each in sampled], likeliest)
    return logits, tokens.clamp(0, logits.shape[1] - 1)


def _sample_row(live: LiveRequest, sequence: Sequence) -> SampleRow:
    adjustment = live.adjustment and live.adjustment.after(sequence.token_ids)
    return SampleRow(live.request.params, live.seed, sequence.num_tokens - sequence.num_prompt_tokens, adjustment)


def _launch_logprobs(
    logits: Tensor, tokens: Tensor, sampled: SequenceOf[SampledRow], asked: SequenceOf[int]
) -> list[ReportedLogprobs]:
    requests = [sampled[index].live.request for index in asked]
    queries = [LogprobQuery(each.params.logprobs or 0, each.logprobs_temperature) for each in requests]
    if len(asked) != len(sampled):
        index = to_device(asked, logits.device)
        logits, tokens = logits[index], tokens[index]
    return launch_logprobs(logits, tokens, queries)


def _score(logits: Tensor, scored: SequenceOf[tuple[int, Sequence]]) -> list[tuple[Sequence, list[float]]]:
    nodes = [sequence.choice_node for _, sequence in scored if sequence.choice_node is not None]
    scores = score_choices(logits[[row for row, _ in scored]], nodes)
    return [(sequence, score) for (_, sequence), score in zip(scored, scores, strict=True)]
