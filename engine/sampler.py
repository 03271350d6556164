"""Logits to tokens, and to the probabilities of choices."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from ..kernels.sampling import philox_uniform, sample_tokens
from .adjustment import Adjustment, adjust_
from .choices import ChoiceNode
from .request import SamplingParams

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class SampleRow:
    """How one row is sampled: its parameters, its seed, and how many tokens were drawn with that seed before.

    `adjustment`, up to date, changes the row's logits first.
    """

    params: SamplingParams
    seed: int
    counter: int
    adjustment: Adjustment | None = None


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> list[int]:
    """One token a row. A row's token depends on its own logits, seed, counter and adjustment only.

    logits: [n, vocab] float32; rows that have an adjustment are changed in place.
    """
    adjustments = {index: row.adjustment for index, row in enumerate(rows) if row.adjustment is not None}
    if adjustments:
        adjust_(logits, adjustments)
    tokens = logits.argmax(-1)
    drawn = [index for index, row in enumerate(rows) if not row.params.is_greedy]
    if drawn:
        tokens[drawn] = _draw(logits[drawn], [rows[index] for index in drawn])
    return [int(token) for token in tokens.tolist()]


def _draw(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    device = logits.device
    return sample_tokens(
        logits,
        temperature=_doubles([row.params.temperature for row in rows], device),
        top_k=torch.tensor([row.params.top_k for row in rows], device=device),
        top_p=_doubles([row.params.top_p for row in rows], device),
        min_p=_doubles([row.params.min_p for row in rows], device),
        uniforms=_uniforms([row.seed for row in rows], [row.counter for row in rows], device),
    )


def _doubles(values: list[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)


def _uniforms(seeds: list[int], counters: list[int], device: torch.device) -> Tensor:
    return philox_uniform(
        torch.tensor(seeds, dtype=torch.int64, device=device),
        torch.tensor(counters, dtype=torch.int64, device=device),
    )


def token_logprobs(logits: Tensor, tokens: Sequence[int], nums: Sequence[int]) -> list[dict[int, float]]:
    """For each row its token's log-probability, first, and those of its `num` likeliest tokens, in their order.

    logits: [n, vocab] float32, as the model gave them.
    """
    result: list[dict[int, float]] = [{} for _ in tokens]
    # Grouped, because which of two equally likely tokens is among the k likeliest depends on k.
    for num, members in _grouped(nums).items():
        logprobs = logits[members].log_softmax(-1)
        own = logprobs.gather(1, torch.tensor([[tokens[index]] for index in members], device=logits.device))
        top = logprobs.topk(min(num, logits.shape[1]), dim=-1)
        for index, value, ids, values in zip(
            members, own.squeeze(1).tolist(), top.indices.tolist(), top.values.tolist(), strict=True
        ):
            result[index] = {tokens[index]: value, **dict(zip(ids, values, strict=True))}
    return result


def score_choices(logits: Tensor, nodes: Sequence[ChoiceNode]) -> list[list[float]]:
    """Log-probabilities of each row's node's children, normalised among them.

    logits: [n, vocab] float32, one row a node. Rows of equal children are computed together.
    """
    scores: list[list[float]] = [[] for _ in nodes]
    for children, members in _grouped([node.children for node in nodes]).items():
        allowed = logits[members][:, list(children)]
        for index, row in zip(members, allowed.double().log_softmax(-1).tolist(), strict=True):
            scores[index] = row
    return scores


def pick_choice(probabilities: Sequence[float], params: SamplingParams, seed: int) -> int:
    """Index of the most probable choice, or with a temperature of a drawn one."""
    weights = torch.tensor(probabilities, dtype=torch.float64)
    if params.is_greedy:
        return int(weights.argmax())
    tempered = (weights.log() / params.temperature).softmax(-1).cumsum(-1)
    target = _uniforms([seed], [0], weights.device) * tempered[-1]
    return int(torch.searchsorted(tempered, target).clamp(max=len(probabilities) - 1))


def _grouped(keys: Sequence[Key]) -> dict[Key, list[int]]:
    groups: dict[Key, list[int]] = defaultdict(list)
    for index, key in enumerate(keys):
        groups[key].append(index)
    return groups
