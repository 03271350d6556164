"""Logits to tokens, and to the probabilities of choices."""

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import numpy
import torch
from torch import Tensor

from ...kernels.sampling import likeliest_tokens, philox_uniform, sample_tokens, token_ranks
from ..logprobs import Logprob
from ..sampling_params import SamplingParams
from ..structured.choices import ChoiceNode
from ..transfer import Readback, to_device
from .adjustment import Adjustment, adjust_

Key = TypeVar("Key", bound=Hashable)

# Bytes of the copies that a CPU adjusts and samples at a time: they stay in its caches, and in memory that is there.
_PIECE = 8 * 2**20


class SampleRow(NamedTuple):
    """How one row is sampled: its parameters, its seed, and how many tokens were drawn with that seed before.

    `adjustment`, up to date, changes the row's logits first.
    """

    params: SamplingParams
    seed: int
    counter: int
    adjustment: Adjustment | None = None


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """As `launch_sample`, and wait for the tokens."""
    return [int(token) for token in launch_sample(logits, rows).tolist()]


def launch_sample(logits: Tensor, rows: Sequence[SampleRow], likeliest: Tensor | None = None) -> Tensor:
    """One token a row: [n] int64. A row's token depends on its own logits, seed, counter and adjustment only.

    logits: [n, vocab] of any float type; they are not changed. likeliest: [n] int64, each row's token with the largest
    logit, where that is known already. On a GPU the host waits for nothing unless a row is adjusted.
    """
    adjusted = [index for index, row in enumerate(rows) if row.adjustment is not None]
    if not adjusted:
        return PlainSampling.of(rows, logits.device).sample(logits, likeliest)
    tokens = torch.zeros(len(rows), dtype=torch.int64, device=logits.device)
    plain = [index for index, row in enumerate(rows) if row.adjustment is None]
    for members in (plain, *_pieces(adjusted, logits)):
        if not members:
            continue
        chosen = [rows[index] for index in members]
        # A slice where that is the same: it copies nothing.
        are_neighbours = members[-1] - members[0] + 1 == len(members)
        index = slice(members[0], members[-1] + 1) if are_neighbours else to_device(members, logits.device)
        part, known = logits[index], likeliest[index] if likeliest is not None else None
        if members is not plain:
            part, known = part.to(torch.float32, copy=True), None
            adjust_(part, {place: row.adjustment for place, row in enumerate(chosen) if row.adjustment is not None})
        tokens[index] = PlainSampling.of(chosen, logits.device).sample(part, known)
    return tokens


def _pieces(rows: Sequence[int], logits: Tensor) -> Iterator[Sequence[int]]:
    """The rows as they are to be copied as float32: on a CPU few at a time."""
    fitting = max(torch.get_num_threads(), _PIECE // (4 * logits.shape[1]))
    size = fitting if logits.device.type == "cpu" else len(rows)
    return (rows[start : start + size] for start in range(0, len(rows), size))


class PlainSampling:
    """Rows without adjustments as tensors, which serve for as long as the same rows are sampled.

    `drawn`: those of `num_rows` rows, at these `indices`, that are not greedy.
    """

    def __init__(self, num_rows: int, indices: Sequence[int], drawn: Sequence[SampleRow], device: torch.device) -> None:
        self._num_drawn = len(drawn)
        if not drawn:
            return
        self._are_all_drawn = len(drawn) == num_rows
        self._drawn = to_device(indices, device)
        self._temperature = to_device([row.params.temperature for row in drawn], device, numpy.float64)
        self._top_k = to_device([row.params.top_k for row in drawn], device)
        self._top_p = to_device([row.params.top_p for row in drawn], device, numpy.float64)
        self._min_p = to_device([row.params.min_p for row in drawn], device, numpy.float64)
        self._seeds = to_device([row.seed for row in drawn], device)
        self._counters = to_device([row.counter for row in drawn], device)

    @classmethod
    def of(cls, rows: Sequence[SampleRow], device: torch.device) -> Self:
        indices = [index for index, row in enumerate(rows) if not row.params.is_greedy]
        return cls(len(rows), indices, [rows[index] for index in indices], device)

    def advance(self) -> None:
        """Every row has drawn a token, and is to draw another."""
        if self._num_drawn:
            self._counters = self._counters + 1

    def sample(self, logits: Tensor, likeliest: Tensor | None = None) -> Tensor:
        """As `launch_sample`."""
        if self._num_drawn and self._are_all_drawn:
            return self._draw(logits, likeliest)
        tokens = likeliest_tokens(logits).tokens if likeliest is None else likeliest
        if not self._num_drawn:
            return tokens
        return tokens.index_copy(0, self._drawn, self._draw(logits[self._drawn], tokens[self._drawn]))

    def _draw(self, logits: Tensor, likeliest: Tensor | None) -> Tensor:
        uniforms = philox_uniform(self._seeds, self._counters)
        tokens = sample_tokens(logits, self._temperature, self._top_k, self._top_p, self._min_p, uniforms, likeliest)
        # Nothing is drawn from a row that is not finite.
        return tokens.clamp_(0, logits.shape[1] - 1)


class LogprobQuery(NamedTuple):
    """What is to be reported of a row beside its token: its `num_top` likeliest. `temperature` divides its logits."""

    num_top: int
    temperature: float = 1.0


class ReportedLogprobs(NamedTuple):
    """Of the rows `members`, on the device: `ids` and `values` of each row's own token and its likeliest ([n, 1 + k]),
    and the rank of its own ([n]).
    """

    members: list[int]
    ids: Tensor
    values: Tensor
    ranks: Tensor

    @property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.ids, self.values, self.ranks


def token_logprobs(logits: Tensor, tokens: Sequence[int], queries: Sequence[LogprobQuery]) -> list[dict[int, Logprob]]:
    """For each row its token, first, and its likeliest tokens, in their order.

    logits: [n, vocab] of any float type, as the model gave them. A token's rank is its place among the likeliest, or
    where it is not reported as one of them, how many tokens are at least as likely.
    """
    groups = launch_logprobs(logits, to_device(tokens, logits.device), queries)
    values = Readback([part for group in groups for part in group.tensors]).wait()
    return read_logprobs(groups, [part.tolist() for part in values], len(queries))


def launch_logprobs(logits: Tensor, tokens: Tensor, queries: Sequence[LogprobQuery]) -> list[ReportedLogprobs]:
    """What `token_logprobs` is made of, for tokens ([n] int64) that only the device knows; waits for nothing."""
    groups = []
    # Grouped, because which of two equally likely tokens is among the k likeliest depends on k.
    for (num, temperature), members in _grouped(queries).items():
        part, own = logits, tokens
        if len(members) != len(queries):
            index = to_device(members, logits.device)
            part, own = logits[index], tokens[index]
        part = part if temperature == 1 else part.float() / temperature
        groups.append(ReportedLogprobs(members, *_reported(part, own, num)))
    return groups


def read_logprobs(
    groups: Sequence[ReportedLogprobs], values: Sequence[list[Any]], num_rows: int
) -> list[dict[int, Logprob]]:
    """As `token_logprobs` returns them, from the values of the groups' tensors, one after the other."""
    result: list[dict[int, Logprob]] = [{} for _ in range(num_rows)]
    for number, group in enumerate(groups):
        for index, ids, logprobs, rank in zip(group.members, *values[3 * number : 3 * number + 3], strict=True):
            ranks = (rank, *range(1, len(ids)))
            # A token that is its row's own and among the likeliest keeps the first place and the latter rank.
            result[index] = {
                token: Logprob(value, rank) for token, value, rank in zip(ids, logprobs, ranks, strict=True)
            }
    return result


def _reported(logits: Tensor, own: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and log-probabilities ([n, 1 + num]) of each row's own token ([n]) and likeliest, and the own's rank."""
    place = own.unsqueeze(1)
    top = logits.topk(min(num, logits.shape[1]), dim=-1)
    ids, values = torch.cat([place, top.indices], 1), torch.cat([logits.gather(1, place), top.values], 1).float()
    log_sum_exps = likeliest_tokens(logits, with_log_sum_exp=True).log_sum_exps
    assert log_sum_exps is not None
    return ids, values - log_sum_exps.unsqueeze(1), token_ranks(logits, own)


def score_choices(logits: Tensor, nodes: Sequence[ChoiceNode]) -> list[list[float]]:
    """Log-probabilities of each row's node's children, normalised among them.

    logits: [n, vocab] of any float type, one row a node. Rows of equal children are computed together.
    """
    scores: list[list[float]] = [[] for _ in nodes]
    for children, members in _grouped([node.children for node in nodes]).items():
        allowed = logits[to_device(members, logits.device)][:, to_device(children, logits.device)]
        for index, row in zip(members, allowed.double().log_softmax(-1).tolist(), strict=True):
            scores[index] = row
    return scores


def pick_choice(probabilities: Sequence[float], params: SamplingParams, seed: int) -> int:
    """Index of the most probable choice, or with a temperature of a drawn one."""
    weights = torch.tensor(probabilities, dtype=torch.float64)
    if params.is_greedy:
        return int(weights.argmax())
    tempered = (weights.log() / params.temperature).softmax(-1).cumsum(-1)
    target = philox_uniform(torch.tensor([seed]), torch.tensor([0])) * tempered[-1]
    return int(torch.searchsorted(tempered, target).clamp(max=len(probabilities) - 1))


def _grouped(keys: Sequence[Key]) -> dict[Key, list[int]]:
    groups: dict[Key, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        groups[key].append(index)
    return groups
