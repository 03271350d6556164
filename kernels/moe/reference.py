"""The obvious torch that the kernels are compared with; choosing on a CPU is this too."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def choose_experts_reference(
    router_logits: Tensor,
    num_chosen: int,
    normalise: bool,
    correction: Tensor | None = None,
    scale: float = 1.0,
    are_sigmoids: bool = True,
) -> tuple[Tensor, Tensor]:
    """See `choose_experts`."""
    logits = router_logits.float()
    if correction is None:
        shares, ids = logits.softmax(-1).topk(num_chosen, dim=-1)
    else:
        scores = logits.sigmoid() if are_sigmoids else logits.softmax(-1)
        ids = (scores + correction).topk(num_chosen, dim=-1).indices
        shares = scores.gather(1, ids)
    if normalise:
        shares = shares / shares.sum(-1, keepdim=True)
    return ids, shares if scale == 1 else shares * scale


def mix_experts_reference(
    x: Tensor, experts: Sequence[Callable[[Tensor], Tensor]], ids: Tensor, shares: Tensor
) -> Tensor:
    """See `mix_experts`; one token and one expert at a time."""
    mixed = []
    for token, chosen, parts in zip(x, ids.tolist(), shares, strict=True):
        outputs = torch.cat([experts[index](token.unsqueeze(0)) for index in chosen])
        mixed.append((outputs.float() * parts.unsqueeze(1)).sum(0))
    return torch.stack(mixed).to(x.dtype)
