"""The torch path: lone tokens all at once, longer sequences by chunks (arXiv 2412.06464, section 3.3), in float32."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from ..recurrent_states import StateSlots
from .reference import shares, split_heads

_CHUNK = 64
# Of states that are copied, changed and put back at a time: what a cache has room for.
_BYTES_AT_ONCE = 4 << 20


class _Tokens(NamedTuple):
    """Queries and keys, ready for use, and values: [num_tokens, num_heads, dim]; the rest [num_tokens, num_heads].

    rates: the logarithm of what a token leaves of its state. written: how much of what it says comes into it.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    rates: Tensor
    written: Tensor

    def of(self, places: Tensor | slice) -> "_Tokens":
        return _Tokens(*(each[places] for each in self))


def gated_delta_rule_chunked(
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
    tokens = _Tokens(queries, keys, values, rates, shares(beta, doubles_beta))
    output = torch.empty_like(values, memory_format=torch.contiguous_format)
    at_once = max(_BYTES_AT_ONCE // states[0].nbytes, 1)
    for places, read, write in zip(*(torch.split(each, at_once) for each in slots.lone_tokens), strict=True):
        output[places] = _update(tokens.of(places), states, read, write)
    for start, length, read, write in slots.longer:
        state = states[read]
        for first in range(start, start + length, _CHUNK):
            chunk = slice(first, min(first + _CHUNK, start + length))
            result, state = _go_on(tokens.of(chunk), state)
            output[chunk] = result.transpose(0, 1)
        states[write] = state
    return output.to(mixed.dtype)


def _update(tokens: _Tokens, states: Tensor, read: Tensor, write: Tensor) -> Tensor:
    """The outputs of tokens of different sequences, [num_tokens, num_heads, value_dim]; states are changed in place."""
    queries, keys, values, rates, written = tokens
    # In a sixth of an index's time; putting back one by one takes a third of it.
    state = states.index_select(0, read).mul_(rates.exp()[..., None, None])
    change = written.unsqueeze(-1) * (values - (keys.unsqueeze(2) @ state).squeeze(2))
    state.addcmul_(keys.unsqueeze(3), change.unsqueeze(2))
    for slot, own in zip(write.tolist(), state, strict=True):
        states[slot] = own
    return (queries.unsqueeze(2) @ state).squeeze(2)


def _go_on(chunk: _Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """The outputs of a sequence's next tokens, [num_heads, num_tokens, value_dim], and the state after them.

    What a token writes depends on what those before it do: a triangular system.
    """
    queries, keys, values, rates, written = (each.transpose(0, 1) for each in chunk)
    # Logarithms of what is left, at a token, of what the chunk began with.
    left = rates.cumsum(1)
    apart = left.unsqueeze(2) - left.unsqueeze(1)
    between = apart.masked_fill_(torch.ones_like(apart[0], dtype=torch.bool).triu_(1), -torch.inf).exp_()
    system = (keys * written.unsqueeze(2)) @ keys.mT * between
    before = left.exp().unsqueeze(2)
    rest = written.unsqueeze(2) * (values - before * (keys @ state))
    change = torch.linalg.solve_triangular(system, rest, upper=False, unitriangular=True)
    output = before * (queries @ state) + (queries @ keys.mT * between) @ change
    after = (left[:, -1:] - left).exp().unsqueeze(2)
    return output, before[:, -1:] * state + (keys * after).mT @ change
