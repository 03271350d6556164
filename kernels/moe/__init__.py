"""A mixture of experts: which of them a token goes to, and their outputs mixed."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..device import runs_triton
from .expert_groups import ONE_GROUP, ExpertGroups
from .reference import choose_experts_reference, mix_experts_reference
from .stacked_experts import ClampedGate, ExpertGate, SquaredRelu, StackedExperts, stack_experts

Expert = Callable[[Tensor], Tensor]


def choose_experts(
    router_logits: Tensor,
    num_chosen: int,
    normalise: bool,
    correction: Tensor | None = None,
    scale: float = 1.0,
    are_sigmoids: bool = True,
    groups: ExpertGroups = ONE_GROUP,
) -> tuple[Tensor, Tensor]:
    """The likeliest experts of each token, and their shares.

    router_logits: [num_tokens, num_experts]. Returns expert ids [num_tokens, num_chosen] int64 and shares
    [num_tokens, num_chosen] float32: probabilities among all experts, or with `normalise` among the chosen, times
    `scale`. correction: [num_experts] float32; then scores are sigmoids, or not `are_sigmoids` but probabilities, and
    chosen are those that are largest with it (as DeepSeek-V3 balances its experts, arXiv 2412.19437). `groups`: chosen
    are experts of a few of them alone. Changes nothing.
    """
    if runs_triton(router_logits):
        from .triton import choose_experts_triton

        return choose_experts_triton(router_logits, num_chosen, normalise, correction, scale, are_sigmoids, groups)
    return choose_experts_reference(router_logits, num_chosen, normalise, correction, scale, are_sigmoids, groups)


def mix_experts(x: Tensor, experts: Sequence[Expert], ids: Tensor, shares: Tensor) -> Tensor:
    """Each token's chosen experts applied to it, and the outputs summed by their shares.

    x: [num_tokens, size], one token or more; ids, shares: as `choose_experts` gives them. Tokens are sorted by
    expert, so that each is called at most once, with all its tokens; one that nobody chose is not called. Returns
    [num_tokens, size of an output], of x's dtype; changes nothing.
    """
    num_tokens, num_chosen = ids.shape
    order = ids.flatten().argsort(stable=True)
    rows = x[order // num_chosen]
    # Not bincount: on a GPU the host would wait twice more, to look for the least id and the largest.
    counts = ids.new_zeros(len(experts)).scatter_add_(0, ids.flatten(), torch.ones_like(ids).flatten()).tolist()
    chosen = zip(experts, rows.split_with_sizes(counts), strict=True)
    by_expert = torch.cat([expert(part) for expert, part in chosen if len(part)])
    outputs = torch.empty_like(by_expert)
    outputs[order] = by_expert
    return torch.bmm(shares.to(x.dtype).unsqueeze(1), outputs.view(num_tokens, num_chosen, -1)).squeeze(1)


def mix_stacked_experts(x: Tensor, experts: StackedExperts, ids: Tensor, shares: Tensor) -> Tensor:
    """As `mix_experts`, with the experts' matrices side by side on a GPU: the host neither waits nor chooses.

    Of x's dtype, as matrices that are not quantised are. Raises `ValueError` naming the argument that does not fit.
    """
    from .triton import mix_stacked_experts_triton

    return mix_stacked_experts_triton(x, experts, ids, shares)


__all__ = [
    "ClampedGate",
    "Expert",
    "ExpertGate",
    "ExpertGroups",
    "SquaredRelu",
    "StackedExperts",
    "choose_experts",
    "choose_experts_reference",
    "mix_experts",
    "mix_experts_reference",
    "mix_stacked_experts",
    "stack_experts",
]
