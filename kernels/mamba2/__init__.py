"""Mamba-2: layers that keep a state of fixed size, each head's decaying at a rate of its own (arXiv 2405.21060)."""

import math

import torch
from torch import Tensor

from ..device import runs_triton
from ..recurrent_states import StateSlots
from .chunked import selective_scan_chunked
from .native import (
    grouped_gated_rms_norm_native,
    selective_scan_native,
    takes_native_norm,
    takes_native_scan,
)
from .reference import grouped_gated_rms_norm_reference
from .sizes import num_groups_of


def selective_scan(
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
    """Write each token's input under its B into its sequence's state, and read what the state has for its C.

    Of a head's state S a token with an input x makes S ← e^(-Δ · e^decay_scale) · S, S ← S + Δ · B ⊗ x, and has the
    output Sᵀ C + skip · x, all in float32; Δ = softplus(dt + dt_bias), held within `dt_limits`.

    mixed: [num_tokens, num_heads * head_dim + 2 * num_groups * state_dim], the heads' x, then each group's B, then each
    group's C; a group serves num_heads / num_groups consecutive heads. dt: [num_tokens, num_heads], of mixed's dtype,
    its rows evenly apart. decay_scale, dt_bias, skip: [num_heads] float32. states: [num_slots, num_heads, state_dim,
    head_dim] float32; those that `slots` writes are changed in place. Returns [num_tokens, num_heads, head_dim], of
    mixed's dtype. Raises `ValueError` naming the argument that does not fit.
    """
    if runs_triton(mixed):
        from .triton import selective_scan_triton

        # It asks more of its arguments than others, and checks them itself.
        return selective_scan_triton(mixed, dt, decay_scale, dt_bias, skip, states, slots, dt_limits=dt_limits)
    _check_scan(mixed, dt, decay_scale, dt_bias, skip, states, slots, dt_limits)
    if takes_native_scan(mixed, dt, decay_scale, dt_bias, skip, states):
        return selective_scan_native(mixed, dt, decay_scale, dt_bias, skip, states, slots, dt_limits=dt_limits)
    return selective_scan_chunked(mixed, dt, decay_scale, dt_bias, skip, states, slots, dt_limits=dt_limits)


def grouped_gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int) -> Tensor:
    """x times SiLU of its gate, then `rms_norm` of each group of columns, in float32, and rounded once.

    x: [num_tokens, size], contiguous; gate: the same shape, its rows evenly apart; weight: [size], of which each group
    has its own. All of one dtype. Returns x's shape and dtype; changes nothing. Raises `ValueError` naming the argument
    that does not fit.
    """
    if runs_triton(x):
        from .triton import grouped_gated_rms_norm_triton

        # As above.
        return grouped_gated_rms_norm_triton(x, gate, weight, eps, num_groups)
    _check_norm(x, gate, weight, num_groups)
    if takes_native_norm(x, gate, weight, num_groups):
        return grouped_gated_rms_norm_native(x, gate, weight, eps, num_groups)
    return grouped_gated_rms_norm_reference(x, gate, weight, eps, num_groups)


def _check_scan(
    mixed: Tensor,
    dt: Tensor,
    decay_scale: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    states: Tensor,
    slots: StateSlots,
    dt_limits: tuple[float, float],
) -> None:
    if states.ndim != 4 or states.dtype != torch.float32:
        raise ValueError(
            f"states {tuple(states.shape)}, {states.dtype}, must be [num_slots, num_heads, state_dim, head_dim] float32"
        )
    if mixed.ndim != 2 or len(mixed) != slots.num_tokens:
        raise ValueError(f"mixed {tuple(mixed.shape)} must be [{slots.num_tokens} tokens, size]")
    num_groups_of(mixed, states, dt_limits)
    num_heads = states.shape[1]
    if dt.shape != (len(mixed), num_heads) or dt.dtype != mixed.dtype:
        raise ValueError(
            f"dt {tuple(dt.shape)}, {dt.dtype}, must be [{len(mixed)} tokens, {num_heads} heads], of mixed's "
            f"{mixed.dtype}"
        )
    for name, tensor in (("decay_scale", decay_scale), ("dt_bias", dt_bias), ("skip", skip)):
        if tensor.shape != (num_heads,) or tensor.dtype != torch.float32:
            raise ValueError(f"{name} {tuple(tensor.shape)}, {tensor.dtype}, must be [{num_heads} heads] float32")


def _check_norm(x: Tensor, gate: Tensor, weight: Tensor, num_groups: int) -> None:
    if x.ndim != 2 or num_groups < 1 or x.shape[1] % num_groups:
        raise ValueError(f"x {tuple(x.shape)} must be [num_tokens, size], of {num_groups} groups of equal size")
    for name, tensor, wanted in (("gate", gate, tuple(x.shape)), ("weight", weight, (x.shape[1],))):
        if tensor.shape != wanted or tensor.dtype != x.dtype:
            raise ValueError(f"{name} {tuple(tensor.shape)}, {tensor.dtype}, must be {list(wanted)}, of x's {x.dtype}")


__all__ = ["grouped_gated_rms_norm", "selective_scan"]
