"""Logits to tokens, and to the probabilities of choices."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from ..kernels.sampling import likeliest_tokens, philox_uniform, sample_tokens
from .adjustment import Adjustment, adjust_
from .choices import ChoiceNode
from .logprobs import Logprob
from .request import SamplingParams

Key = TypeVar("Key", bound=Hashable)


class SampleRow(NamedTuple):
    """How one row is sampled: its parameters, its seed, and how many tokens were drawn with that seed before.

    `adjustment`, up to date, changes the row's logits first.
    """

    params: SamplingParams
    seed: int
    counter: int
    adjustment: Adjustment | None = None


def sample(logits: Tensor, rows: Sequence[SampleRow], likeliest: Tensor | None = None) -> list[int]:
    """One token a row. A row's token depends on its own logits, seed, counter and adjustment only.

    logits: [n, vocab] of any float type; they are not changed. likeliest: [n] int64, each row's token with the largest
    logit, where that is known already.
    """
    adjusted = [index for index, row in enumerate(rows) if row.adjustment is not None]
    if not adjusted:
        return _choose(logits, rows, likeliest)
    tokens = [0] * len(rows)
    plain = [index for index, row in enumerate(rows) if row.adjustment is None]
    for members in (plain, adjusted):
        chosen = [rows[index] for index in members]
        part, known = logits[members], likeliest[members] if likeliest is not None else None
        if members is adjusted:
            part, known = part.float(), None
            adjust_(part, {place: row.adjustment for place, row in enumerate(chosen) if row.adjustment is not None})
        for index, token in zip(members, _choose(part, chosen, known), strict=True):
            tokens[index] = token
    return tokens


def _choose(logits: Tensor, rows: Sequence[SampleRow], likeliest: Tensor | None) -> list[int]:
    """As `sample`, of logits that are adjusted already."""
    drawn = [index for index, row in enumerate(rows) if not row.params.is_greedy]
    if len(drawn) == len(rows):
        tokens = _draw(logits, rows)
    else:
        tokens = likeliest_tokens(logits).tokens if likeliest is None else likeliest.clone()
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


@dataclass(frozen=True, slots=True)
class LogprobRow:
    """What is to be reported of a row: its token, and its `num_top` likeliest. `temperature` divides its logits."""

    token: int
    num_top: int
    temperature: float = 1.0


def token_logprobs(logits: Tensor, rows: Sequence[LogprobRow]) -> list[dict[int, Logprob]]:
    """For each row its token, first, and its likeliest tokens, in their order.

    logits: [n, vocab] of any float type, as the model gave them. A token's rank is its place among the likeliest, or
    where it is not reported as one of them, how many tokens are at least as likely.
    """
    result: list[dict[int, Logprob]] = [{} for _ in rows]
    # Grouped, because which of two equally likely tokens is among the k likeliest depends on k.
    for (num, temperature), members in _grouped([(row.num_top, row.temperature) for row in rows]).items():
        part = logits if len(members) == len(rows) else logits[members]
        own = torch.tensor([[rows[index].token] for index in members], device=logits.device)
        reported = _reported(part if temperature == 1 else part.float() / temperature, own, num)
        for index, ids, values, rank in zip(members, *(part.tolist() for part in reported), strict=True):
            ranks = (rank, *range(1, len(ids)))
            # A token that is its row's own and among the likeliest keeps the first place and the latter rank.
            result[index] = {token: Logprob(value, rank) for token, value, rank in zip(ids, values, ranks, strict=True)}
    return result


def _reported(logits: Tensor, own: Tensor, num: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and log-probabilities ([n, 1 + num]) of each row's own token ([n, 1]) and likeliest, and the own's rank."""
    own_logits = logits.gather(1, own)
    top = logits.topk(min(num, logits.shape[1]), dim=-1)
    ids, values = torch.cat([own, top.indices], 1), torch.cat([own_logits, top.values], 1).float()
    log_sum_exps = likeliest_tokens(logits, with_log_sum_exp=True).log_sum_exps
    assert log_sum_exps is not None
    return ids, values - log_sum_exps.unsqueeze(1), (logits >= own_logits).sum(-1)


def score_choices(logits: Tensor, nodes: Sequence[ChoiceNode]) -> list[list[float]]:
    """Log-probabilities of each row's node's children, normalised among them.

    logits: [n, vocab] of any float type, one row a node. Rows of equal children are computed together.
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
