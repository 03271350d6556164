"""What a step's logits say: a token for each sequence that generates, scores for each that reached a choice."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.sampling import likeliest_tokens
from ..logprobs import TokenLogprobs
from ..sampling.sampler import ReportedLogprobs, launch_logprobs, read_logprobs, score_choices
from ..scheduling.sequence import Sequence
from ..transfer import Readback, to_device
from .sampling_batch import SampledRow, SamplingBatch


@dataclass(frozen=True, slots=True)
class StepResult:
    """`tokens`: one for each of the batch's `sampled`; `logprobs`: one entry, by the index of those who ask for them.

    `scores`: the log-probabilities of a choice node's children. `broken_rows`: whose logits are not finite.
    `rejected_rows`: those after a wrong guess, which nothing is wanted of.
    `waited_seconds`: for how long the host had nothing to do but wait for it.
    """

    batch: SamplingBatch
    tokens: list[int]
    logprobs: Mapping[int, TokenLogprobs]
    scores: list[tuple[Sequence, list[float]]]
    broken_rows: frozenset[int]
    waited_seconds: float
    rejected_rows: frozenset[int] = frozenset()

    @property
    def broken(self) -> list[Sequence]:
        return [self.batch.ended[row] for row in sorted(self.broken_rows - self.rejected_rows)]

    def logprobs_of(self, index: int) -> tuple[TokenLogprobs, ...]:
        """Of the batch's sampled row of this index."""
        return (self.logprobs[index],) if index in self.logprobs else ()

    def drawn(self) -> Iterator[tuple[SampledRow, int, tuple[TokenLogprobs, ...]]]:
        """Each sampled row with its token and its log-probabilities, but for those that are broken or rejected."""
        unwanted = self.broken_rows | self.rejected_rows
        for index, (sampled, token) in enumerate(zip(self.batch.sampled, self.tokens, strict=True)):
            if sampled.row not in unwanted:
                yield sampled, token, self.logprobs_of(index)


@dataclass(frozen=True, slots=True)
class LaunchedResult:
    """A step's result while it is computed: `tokens` ([n] int64, on the device) of the batch's `sampled`.

    `score_logits`: the step's logits, where choices are to be scored.
    """

    batch: SamplingBatch
    tokens: Tensor
    score_logits: Tensor | None
    reported: SequenceOf[ReportedLogprobs]
    _readback: Readback

    @classmethod
    def of(cls, logits: Tensor, batch: SamplingBatch) -> "LaunchedResult":
        """Sample. Changes nothing and waits for nothing, so that a step that raises here can be undone.

        logits: [n, vocab], one row for each of the batch's `ended`.
        """
        likeliest = likeliest_tokens(logits)
        rows, tokens = batch.sample(logits, likeliest.tokens)
        reported = _launch_logprobs(rows, tokens, batch) if batch.asked else []
        readback = Readback([tokens, likeliest.logits, *(each for part in reported for each in part.tensors)])
        return cls(batch, tokens, logits if batch.scored else None, reported, readback)

    def read(self) -> StepResult:
        """Wait for it. Changes nothing."""
        begin = perf_counter()
        tokens, likeliest, *reported = self._readback.wait()
        waited_seconds = perf_counter() - begin
        batch, broken = self.batch, _not_finite(likeliest)
        scored = [(row, sequence) for row, sequence in batch.scored if row not in broken]
        return StepResult(
            batch,
            tokens=tokens.tolist(),
            logprobs=self._logprobs(reported) if batch.asked else {},
            scores=_score(self.score_logits, scored) if self.score_logits is not None and scored else [],
            broken_rows=broken,
            waited_seconds=waited_seconds,
        )

    def _logprobs(self, reported: SequenceOf[NDArray[Any]]) -> dict[int, TokenLogprobs]:
        asked, values = self.batch.asked, [each.tolist() for each in reported]
        return dict(zip(asked, read_logprobs(self.reported, values, len(asked)), strict=True))


def _not_finite(likeliest: NDArray[numpy.float32]) -> frozenset[int]:
    """The rows that have a NaN anywhere, or nothing but infinities: it shows in their largest logit."""
    are_finite = numpy.isfinite(likeliest)
    return frozenset() if are_finite.all() else frozenset(numpy.flatnonzero(~are_finite).tolist())


def _launch_logprobs(logits: Tensor, tokens: Tensor, batch: SamplingBatch) -> list[ReportedLogprobs]:
    if len(batch.asked) != len(batch.served):
        index = to_device(batch.asked, logits.device)
        logits, tokens = logits[index], tokens[index]
    return launch_logprobs(logits, tokens, batch.queries)


def _score(logits: Tensor, scored: SequenceOf[tuple[int, Sequence]]) -> list[tuple[Sequence, list[float]]]:
    nodes = [sequence.choice_node for _, sequence in scored if sequence.choice_node is not None]
    scores = score_choices(logits[to_device([row for row, _ in scored], logits.device)], nodes)
    return [(sequence, score) for (_, sequence), score in zip(scored, scores, strict=True)]
