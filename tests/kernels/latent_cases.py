"""What is done to latents before they are attended to."""

import torch
from torch import Tensor

from headrace.kernels.kv_cache import PADDING_SLOT


def latents_of(tokens: int, heads: int, size: int, rotary_dim: int, device: torch.device) -> dict[str, Tensor]:
    """What `rotate_and_write_latents` is given: parts of wider tensors, a cache of NaN, and a token that is padding."""
    generator = torch.Generator().manual_seed(size)

    def randn(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(device)

    slots = torch.randperm(48, generator=generator)[:tokens]
    slots[1:2] = PADDING_SLOT
    angles = randn(tokens, rotary_dim // 2)
    return {
        "turned": randn(tokens, heads, 11 + rotary_dim)[..., 11:],
        "latents": randn(tokens, 13 + size + rotary_dim)[:, 13:],
        "norm": randn(size),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "queries": torch.full((tokens, heads, size + rotary_dim), torch.nan, device=device),
        "cache": torch.full((3, 16, 1, size + rotary_dim), torch.nan, device=device),
        "slots": slots.to(device),
    }
