"""Gated DeltaNet: attention that keeps a state of fixed size instead of keys and values (arXiv 2412.06464)."""

import torch
from torch import Tensor

from ..device import runs_triton
from ..recurrent_states import StateSlots
from .chunked import gated_delta_rule_chunked
from .native import (
    gated_delta_rule_native,
    gated_rms_norm_native,
    takes_native_norm,
    takes_native_rule,
)
from .reference import gated_rms_norm_reference
from .sizes import num_key_heads_of


def gated_delta_rule(
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
    """Write each token's value under its key into its sequence's state, and read what the state has for its query.

    Of a head's state S, a key k and a query q of length 1, q divided by √key_dim, and a value v a token makes
    S ← e^g · S, S ← S + k ⊗ β · (v - Sᵀk), and has the output Sᵀq, all in float32; g = -e^decay_scale ·
    softplus(decay + decay_bias), β = sigmoid(beta), or where it `doubles_beta` twice that: beyond 1 what the state has
    under a key turns round (arXiv 2411.12537).

    mixed: [num_tokens, 2 * num_key_heads * key_dim + num_heads * value_dim], queries, then keys, then values; each
    query and key head serves num_heads / num_key_heads consecutive heads. decay, beta: [num_tokens, num_heads], of
    mixed's dtype, their rows evenly apart. decay_scale, decay_bias: [num_heads] float32. states: [num_slots, num_heads,
    key_dim, value_dim] float32; those that `slots` writes are changed in place. Returns [num_tokens, num_heads,
    value_dim], of mixed's dtype. Raises `ValueError` naming the argument that does not fit.
    """
    if runs_triton(mixed):
        from .triton import gated_delta_rule_triton

        # It asks more of its arguments than others, and checks them itself.
        return gated_delta_rule_triton(
            mixed, decay, beta, decay_scale, decay_bias, states, slots, doubles_beta=doubles_beta
        )
    _check_rule(mixed, decay, beta, decay_scale, decay_bias, states, slots)
    if takes_native_rule(mixed, decay, beta, decay_scale, decay_bias, states):
        return gated_delta_rule_native(
            mixed, decay, beta, decay_scale, decay_bias, states, slots, doubles_beta=doubles_beta
        )
    return gated_delta_rule_chunked(
        mixed, decay, beta, decay_scale, decay_bias, states, slots, doubles_beta=doubles_beta
    )


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` of each head, times SiLU of its gate, in float32.

    x: [num_tokens, num_heads, size], contiguous; gate: [num_tokens, num_heads * size], its rows evenly apart; weight:
    [size]. All of one dtype. Returns x's shape and dtype; changes nothing.
    """
    if takes_native_norm(x, gate, weight):
        return gated_rms_norm_native(x, gate, weight, eps)
    if runs_triton(x):
        from .triton import gated_rms_norm_triton

        return gated_rms_norm_triton(x, gate, weight, eps)
    return gated_rms_norm_reference(x, gate, weight, eps)


def _check_rule(
    mixed: Tensor,
    decay: Tensor,
    beta: Tensor,
    decay_scale: Tensor,
    decay_bias: Tensor,
    states: Tensor,
    slots: StateSlots,
) -> None:
    if states.ndim != 4 or states.dtype != torch.float32:
        raise ValueError(
            f"states {tuple(states.shape)}, {states.dtype}, must be [num_slots, num_heads, key_dim, value_dim] float32"
        )
    if mixed.ndim != 2 or len(mixed) != slots.num_tokens:
        raise ValueError(f"mixed {tuple(mixed.shape)} must be [{slots.num_tokens} tokens, size]")
    num_key_heads_of(mixed, states)
    num_heads = states.shape[1]
    for name, tensor in (("decay", decay), ("beta", beta)):
        if tensor.shape != (len(mixed), num_heads) or tensor.dtype != mixed.dtype:
            raise ValueError(
                f"{name} {tuple(tensor.shape)}, {tensor.dtype}, must be [{len(mixed)} tokens, {num_heads} heads], of "
                f"mixed's {mixed.dtype}"
            )
    for name, tensor in (("decay_scale", decay_scale), ("decay_bias", decay_bias)):
        if tensor.shape != (num_heads,) or tensor.dtype != torch.float32:
            raise ValueError(f"{name} {tuple(tensor.shape)}, {tensor.dtype}, must be [{num_heads} heads] float32")


__all__ = ["gated_delta_rule", "gated_rms_norm"]
