"""The obvious torch, token by token."""

import math

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from ..recurrent_states import StateSlots


def selective_scan_reference(
    mixed: Tensor,
    dt: Tensor,
    decay_scale: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    states: Tensor,
    slots: StateSlots,
    *,
    dt_limits: tuple[float, float] = (0.0, math.inf),
) -> Tensor:
    """See `selective_scan`."""
    _, num_heads, state_dim, head_dim = states.shape
    inputs, into, out_of = split_mixed(mixed.float(), num_heads, state_dim, head_dim)
    into, out_of = (each.repeat_interleave(num_heads // each.shape[1], dim=1) for each in (into, out_of))
    steps = step_sizes(dt, dt_bias, dt_limits)
    kept = (-decay_scale.exp() * steps).exp()
    output = torch.empty_like(inputs, memory_format=torch.contiguous_format)
    for start, length, read, write in slots.spans:
        state = states[read]
        for token in range(start, start + length):
            written = steps[token, :, None, None] * into[token].unsqueeze(2) * inputs[token].unsqueeze(1)
            state = kept[token, :, None, None] * state + written
            output[token] = (state * out_of[token].unsqueeze(2)).sum(1)
        states[write] = state
    return (output + skip.unsqueeze(1) * inputs).to(mixed.dtype)


def step_sizes(dt: Tensor, dt_bias: Tensor, dt_limits: tuple[float, float]) -> Tensor:
    """How much time a token takes, [num_tokens, num_heads] float32."""
    return softplus(dt.float() + dt_bias).clamp(*dt_limits)


def split_mixed(mixed: Tensor, num_heads: int, state_dim: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """[num_tokens, num_heads, head_dim], and each group's B and C, [num_tokens, num_groups, state_dim]."""
    num_tokens, size = len(mixed), (mixed.shape[1] - num_heads * head_dim) // 2
    inputs, *of_groups = mixed.split_with_sizes([num_heads * head_dim, size, size], dim=1)
    into, out_of = (each.view(num_tokens, size // state_dim, state_dim) for each in of_groups)
    return inputs.view(num_tokens, num_heads, head_dim), into, out_of


def grouped_gated_rms_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int) -> Tensor:
    """See `grouped_gated_rms_norm`."""
    gated = (x.float() * silu(gate.float())).view(len(x), num_groups, x.shape[1] // num_groups)
    normed = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    return (normed.flatten(1) * weight.float()).to(x.dtype)
