"""Mamba-2 on the GPU: checks, and launches."""

import math
from typing import Any

import torch
from torch import Tensor

from ..launch_sizes import cdiv, next_power_of_2
from ..recurrent_states import StateSlots
from ..recurrent_states.sequence_table import CHUNK, SequenceTable
from ..triton_checks import FLOAT_DTYPES, check_launch, check_tensor
from ..triton_early_launch import early_launch
from .sizes import num_groups_of
from .triton_kernels import (
    chunked_scan_kernel,
    group_products_kernel,
    grouped_gated_norm_kernel,
    recurrent_scan_kernel,
)

DIMS = range(16, 257)
# A group of a row is one program's registers.
MAX_NORM_SIZE = 65536
_NUMBERS_PER_PROGRAM = 1024
# Columns of a state. One warp has 64 of its numbers a thread, and sums over rows without waiting for other warps.
_FEW_COLUMNS = 16
_CHUNK_COLUMNS = 32


def selective_scan_triton(
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
    """See `selective_scan`. The launches depend on sizes alone, and never on whose state is where."""
    num_groups = _check_scan(mixed, dt, decay_scale, dt_bias, skip, states, slots, dt_limits)
    _, num_heads, state_dim, head_dim = states.shape
    output = torch.empty(slots.num_tokens, num_heads, head_dim, dtype=mixed.dtype, device=mixed.device)
    if not slots.num_tokens:
        return output
    table = slots.table
    given = (output, states, mixed, dt, decay_scale, dt_bias, skip)
    sizes = (*map(float, dt_limits), num_heads, mixed.stride(0), dt.stride(0))
    shape = {
        "HEADS_PER_GROUP": num_heads // num_groups,
        "STATE_DIM": state_dim,
        "HEAD_DIM": head_dim,
        "PADDED_STATE_DIM": next_power_of_2(state_dim),
    }
    # Without tensor cores a chunk's products take as long as going token by token, and spill.
    num_few = table.num_sequences if mixed.dtype == torch.float32 else table.num_few
    if num_few:
        recurrent_scan_kernel[(num_heads * cdiv(head_dim, _FEW_COLUMNS), num_few)](
            *given,
            table.sequences,
            *sizes,
            **shape,
            COLUMNS=_FEW_COLUMNS,
            num_warps=1,
            **early_launch(mixed.device),
        )
    if num_few < table.num_sequences:
        _scan_by_chunks(given, sizes, table, shape)
    return output


def _scan_by_chunks(
    given: tuple[Tensor, ...], sizes: tuple[float, ...], table: SequenceTable, shape: dict[str, Any]
) -> None:
    """The sequences of more than few tokens: what no state is needed for all at once, the rest chunk after chunk."""
    output, _, mixed, *_ = given
    num_tokens, num_heads, head_dim = output.shape
    num_groups = num_heads // shape["HEADS_PER_GROUP"]
    products = torch.empty(num_tokens, num_groups, CHUNK, dtype=torch.float32, device=mixed.device)
    group_products_kernel[(table.num_chunks, num_groups)](
        products,
        mixed,
        table.sequences,
        table.chunks,
        num_heads * head_dim,
        num_groups,
        mixed.stride(0),
        STATE_DIM=shape["STATE_DIM"],
        PADDED_STATE_DIM=shape["PADDED_STATE_DIM"],
        TOKENS=CHUNK,
        num_warps=4,
        **early_launch(mixed.device),
    )
    columns = min(next_power_of_2(head_dim), _CHUNK_COLUMNS)
    # Larger states than the published models' would not fit twice into the shared memory of small cards.
    options = {"num_warps": 4, "num_stages": 2} if shape["STATE_DIM"] <= 128 else {"num_warps": 8, "num_stages": 1}
    chunked_scan_kernel[(num_heads * cdiv(head_dim, columns), table.num_sequences - table.num_few)](
        *given,
        products,
        table.sequences[table.num_few :],
        *sizes,
        **shape,
        COLUMNS=columns,
        TOKENS=CHUNK,
        **options,
        **early_launch(mixed.device),
    )


def _check_scan(
    mixed: Tensor,
    dt: Tensor,
    decay_scale: Tensor,
    dt_bias: Tensor,
    skip: Tensor,
    states: Tensor,
    slots: StateSlots,
    dt_limits: tuple[float, float],
) -> int:
    """How many groups there are, when all fits together."""
    check_launch("mixed", mixed, recurrent_scan_kernel)
    check_tensor("mixed", mixed, (slots.num_tokens, None), FLOAT_DTYPES, mixed.device, is_contiguous=False)
    check_tensor("states", states, (None, None, None, None), (torch.float32,), mixed.device)
    _, num_heads, state_dim, head_dim = states.shape
    if state_dim not in DIMS or head_dim not in DIMS:
        raise ValueError(
            f"states {tuple(states.shape)} has a state_dim of {state_dim} and a head_dim of {head_dim}: both must be "
            f"{DIMS.start} to {DIMS.stop - 1}"
        )
    num_groups = num_groups_of(mixed, states, dt_limits)
    check_tensor("dt", dt, (slots.num_tokens, num_heads), (mixed.dtype,), mixed.device, is_contiguous=False)
    for name, tensor in (("decay_scale", decay_scale), ("dt_bias", dt_bias), ("skip", skip)):
        check_tensor(name, tensor, (num_heads,), (torch.float32,), mixed.device)
    slots.check_device(mixed.device)
    return num_groups


def grouped_gated_rms_norm_triton(x: Tensor, gate: Tensor, weight: Tensor, eps: float, num_groups: int) -> Tensor:
    """See `grouped_gated_rms_norm`."""
    check_launch("x", x, grouped_gated_norm_kernel)
    check_tensor("x", x, (None, None), FLOAT_DTYPES, x.device)
    num_tokens, size = x.shape
    same = ((x.dtype,), x.device)
    check_tensor("gate", gate, (num_tokens, size), *same, is_contiguous=False)
    check_tensor("weight", weight, (size,), *same)
    if num_groups < 1 or size % num_groups or size // num_groups > MAX_NORM_SIZE:
        raise ValueError(f"x {tuple(x.shape)} must be {num_groups} groups of one size of at most {MAX_NORM_SIZE}")
    output = torch.empty_like(x)
    num_rows = num_tokens * num_groups
    if not num_rows:
        return output
    padded = next_power_of_2(size // num_groups)
    rows = max(_NUMBERS_PER_PROGRAM // padded, 1)
    grouped_gated_norm_kernel[(cdiv(num_rows, rows),)](
        output,
        x,
        gate,
        weight,
        eps,
        num_rows,
        num_groups,
        gate.stride(0),
        SIZE=size // num_groups,
        PADDED_SIZE=padded,
        ROWS=rows,
        num_warps=min(max(padded // 512, 4), 16),
        **early_launch(x.device),
    )
    return output
