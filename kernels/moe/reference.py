"""The obvious torch that the grouped products are compared with."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def mix_experts_reference(
    x: Tensor, experts: Sequence[Callable[[Tensor], Tensor]], ids: Tensor, shares: Tensor
) -> Tensor:
    """See `mix_experts`; one token and one expert at a time."""
    mixed = []
    for token, chosen, parts in zip(x, ids.tolist(), shares, strict=True):
        outputs = torch.cat([experts[index](token.unsqueeze(0)) for index in chosen])
        mixed.append((outputs.float() * parts.unsqueeze(1)).sum(0))
    return torch.stack(mixed).to(x.dtype)
