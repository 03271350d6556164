"""The obvious torch that the kernels are compared with; choosing on a CPU is this too."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .expert_groups import ONE_GROUP, ExpertGroups


def choose_experts_reference(
    router_logits: Tensor,
    num_chosen: int,
    normalise: bool,
    correction: Tensor | None = None,
    scale: float = 1.0,
    are_sigmoids: bool = True,
    groups: ExpertGroups = ONE_GROUP,
) -> tuple[Tensor, Tensor]:
    """See `choose_experts`."""
    logits = router_logits.float()
    if correction is None:
        scores = logits.softmax(-1)
        left = _within_groups(scores, groups, num_best=1)
    else:
        scores = logits.sigmoid() if are_sigmoids else logits.softmax(-1)
        left = _within_groups(scores + correction, groups, num_best=2)
    ids = left.topk(num_chosen, dim=-1).indices
    shares = scores.gather(1, ids)
    if normalise:
        shares = shares / shares.sum(-1, keepdim=True)
    return ids, shares if scale == 1 else shares * scale


def _within_groups(scores: Tensor, groups: ExpertGroups, num_best: int) -> Tensor:
    """The scores, -inf outside of the groups whose best experts, so many, have the largest sums."""
    if groups == ONE_GROUP:
        return scores
    of_groups = scores.view(len(scores), groups.number, scores.shape[1] // groups.number)
    sums = of_groups.topk(num_best, dim=-1).values.sum(-1)
    is_left = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, sums.topk(groups.num_chosen, dim=-1).indices, True)
    return of_groups.masked_fill(~is_left.unsqueeze(-1), -torch.inf).flatten(1)


def mix_experts_reference(
    x: Tensor, experts: Sequence[Callable[[Tensor], Tensor]], ids: Tensor, shares: Tensor
) -> Tensor:
    """See `mix_experts`; one token and one expert at a time."""
    mixed = []
    for token, chosen, parts in zip(x, ids.tolist(), shares, strict=True):
        outputs = torch.cat([experts[index](token.unsqueeze(0)) for index in chosen])
        mixed.append((outputs.float() * parts.unsqueeze(1)).sum(0))
    return torch.stack(mixed).to(x.dtype)
