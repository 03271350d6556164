"""The torch path: lone tokens all at once, longer sequences by chunks (arXiv 2405.21060, section 6), in float32."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..recurrent_states import StateSlots
from .reference import split_mixed, step_sizes

_CHUNK = 64
# Of states that are copied, changed and put back at a time: what a cache has room for.
_BYTES_AT_ONCE = 4 << 20


class _Tokens(NamedTuple):
    """What each group's heads have of some tokens. Dimensions: tokens, groups, and but for B and C the group's heads.

    inputs: [..., head_dim]. into, out_of: B and C, [..., state_dim]. steps: Δ. rates: the logarithm of what a token
    leaves of its state.
    """

    inputs: Tensor
    into: Tensor
    out_of: Tensor
    steps: Tensor
    rates: Tensor

    def of(self, places: Tensor | slice) -> "_Tokens":
        return _Tokens(*(each[places] for each in self))


def selective_scan_chunked(
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
    steps = step_sizes(dt, dt_bias, dt_limits)
    rates = -decay_scale.exp() * steps
    num_groups, heads_per_group = into.shape[1], num_heads // into.shape[1]
    inputs, steps, rates = (
        each.view(len(mixed), num_groups, heads_per_group, *each.shape[2:]) for each in (inputs, steps, rates)
    )
    tokens = _Tokens(inputs, into, out_of, steps, rates)
    output = inputs * skip.view(num_groups, heads_per_group, 1)
    by_group = states.view(len(states), num_groups, heads_per_group, state_dim, head_dim)
    at_once = max(_BYTES_AT_ONCE // states[0].nbytes, 1)
    for places, read, write in zip(*(torch.split(each, at_once) for each in slots.lone_tokens), strict=True):
        output[places] += _update(tokens.of(places), by_group, read, write)
    for start, length, read, write in slots.longer:
        state = by_group[read]
        for first in range(start, start + length, _CHUNK):
            chunk = slice(first, min(first + _CHUNK, start + length))
            result, state = _go_on(tokens.of(chunk), state)
            output[chunk] += result
        by_group[write] = state
    return output.view(len(mixed), num_heads, head_dim).to(mixed.dtype)


def _update(tokens: _Tokens, states: Tensor, read: Tensor, write: Tensor) -> Tensor:
    """The outputs of tokens of different sequences; states are changed in place."""
    inputs, into, out_of, steps, rates = tokens
    # In a sixth of an index's time; putting back one by one takes a third of it.
    state = states.index_select(0, read).mul_(rates.exp()[..., None, None])
    state.addcmul_(into[:, :, None, :, None], (inputs * steps.unsqueeze(-1)).unsqueeze(3))
    for slot, own in zip(write.tolist(), state, strict=True):
        states[slot] = own
    return (out_of[:, :, None, None] @ state).squeeze(3)


def _go_on(chunk: _Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of a sequence's next tokens, and the state after them: [groups, heads, state_dim, head_dim]."""
    inputs, into, out_of, steps, rates = chunk
    written = (inputs * steps.unsqueeze(-1)).permute(1, 2, 0, 3)
    into, out_of = into.transpose(0, 1).unsqueeze(1), out_of.transpose(0, 1).unsqueeze(1)
    # Logarithms of what is left, at a token, of what the chunk began with.
    left = rates.cumsum(0).permute(1, 2, 0)
    apart = left.unsqueeze(3) - left.unsqueeze(2)
    is_later = torch.ones(apart.shape[2:], dtype=torch.bool, device=apart.device).triu_(1)
    between = apart.masked_fill_(is_later, -torch.inf).exp_()
    before = left.exp().unsqueeze(3)
    output = before * (out_of @ state) + (out_of @ into.mT * between) @ written
    after = (left[..., -1:] - left).exp().unsqueeze(3)
    state = before[..., -1:, :] * state + into.mT @ (written * after)
    return output.permute(2, 0, 1, 3), state
