"""The obvious torch, token by token."""

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from ..norm_rotary import rms_norm
from ..recurrent_states import StateSlots


def gated_delta_rule_reference(
    mixed: Tensor,
    decay: Tensor,
    beta: Tensor,
    decay_scale: Tensor,
    decay_bias: Tensor,
    states: Tensor,
    slots: StateSlots,
    *,
    doubles_beta: bool = False,
) -> Tensor:
    """See `gated_delta_rule`."""
    _, num_heads, key_dim, value_dim = states.shape
    queries, keys, values = split_heads(mixed.float(), num_heads, key_dim, value_dim)
    rates = -decay_scale.exp() * softplus(decay.float() + decay_bias)
    kept, written = rates.exp().unsqueeze(-1), shares(beta, doubles_beta).unsqueeze(-1)
    output = torch.empty_like(values)
    for start, length, read, write in slots.spans:
        state = states[read]
        for token in range(start, start + length):
            key = keys[token].unsqueeze(-1)
            state = state * kept[token].unsqueeze(-1)
            change = written[token] * (values[token] - (state * key).sum(1))
            state = state + key * change.unsqueeze(1)
            output[token] = (state * queries[token].unsqueeze(-1)).sum(1)
        states[write] = state
    return output.to(mixed.dtype)


def shares(beta: Tensor, doubles_beta: bool) -> Tensor:
    """How much of what a token says comes into its state: float32."""
    share = beta.float().sigmoid()
    return 2 * share if doubles_beta else share


def split_heads(mixed: Tensor, num_heads: int, key_dim: int, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each head's query and key, [num_tokens, num_heads, key_dim], ready for use, and value."""
    key_size = (mixed.shape[1] - num_heads * value_dim) // 2
    *of_keys, values = mixed.split_with_sizes([key_size, key_size, num_heads * value_dim], dim=1)
    queries, keys = (
        _unit(each.view(len(mixed), -1, key_dim)).repeat_interleave(num_heads * key_dim // key_size, dim=1)
        for each in of_keys
    )
    return queries * key_dim**-0.5, keys, values.view(len(mixed), num_heads, value_dim)


def _unit(x: Tensor) -> Tensor:
    """Of length 1; of one that is nearly zero, shorter."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gated_rms_norm_reference(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `gated_rms_norm`."""
    return (rms_norm(x, weight, eps).float() * silu(gate.float()).view_as(x)).to(x.dtype)
