"""Gated DeltaNet on the GPU: checks, and launches."""

import torch
from torch import Tensor

from ..launch_sizes import cdiv, next_power_of_2
from ..recurrent_states import StateSlots
from ..recurrent_states.sequence_table import CHUNK, SequenceTable
from ..triton_checks import FLOAT_DTYPES, check_launch, check_tensor
from ..triton_early_launch import early_launch
from .sizes import num_key_heads_of
from .triton_kernels import (
    chunk_kernel,
    gated_rms_norm_kernel,
    recurrent_rule_kernel,
    scan_kernel,
)

HEAD_DIMS = range(16, 257)
_NUMBERS_PER_PROGRAM = 1024
# Columns of a state. One warp has 64 of its numbers a thread, and sums over keys without waiting for other warps.
_FEW_VALUES = 16
_CHUNK_VALUES = 32
_NUM_FACTORS = 4


def gated_delta_rule_triton(
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
    """See `gated_delta_rule`. The launches depend on sizes alone, and never on whose state is where."""
    heads_per_key = _check_rule(mixed, decay, beta, decay_scale, decay_bias, states, slots)
    _, num_heads, key_dim, value_dim = states.shape
    output = torch.empty(slots.num_tokens, num_heads, value_dim, dtype=mixed.dtype, device=mixed.device)
    if not slots.num_tokens:
        return output
    table = slots.table
    shape = {"HEADS_PER_KEY": heads_per_key, "KEY_DIM": key_dim, "PADDED_KEY_DIM": next_power_of_2(key_dim)}
    # Without tensor cores a chunk's products take as long as going token by token, and spill.
    num_few = table.num_sequences if mixed.dtype == torch.float32 else table.num_few
    if num_few:
        recurrent_rule_kernel[(num_heads * cdiv(value_dim, _FEW_VALUES), num_few)](
            output,
            states,
            *(mixed, decay, beta, decay_scale, decay_bias),
            table.sequences,
            key_dim**-0.5,
            num_heads,
            *(mixed.stride(0), decay.stride(0), beta.stride(0)),
            **shape,
            VALUE_DIM=value_dim,
            VALUES=_FEW_VALUES,
            DOUBLES_BETA=doubles_beta,
            num_warps=1,
            **early_launch(mixed.device),
        )
    if num_few < table.num_sequences:
        _go_by_chunks(output, mixed, decay, beta, decay_scale, decay_bias, states, table, shape, doubles_beta)
    return output


def _go_by_chunks(
    output: Tensor,
    mixed: Tensor,
    decay: Tensor,
    beta: Tensor,
    decay_scale: Tensor,
    decay_bias: Tensor,
    states: Tensor,
    table: SequenceTable,
    shape: dict[str, int],
    doubles_beta: bool,
) -> None:
    """The sequences of more than few tokens: what no state is needed for all at once, the rest chunk after chunk."""
    num_tokens, num_heads, value_dim = output.shape
    factors = torch.empty(_NUM_FACTORS, num_heads, num_tokens, dtype=torch.float32, device=mixed.device)
    matrices = torch.empty(2, num_tokens, num_heads, CHUNK, dtype=mixed.dtype, device=mixed.device)
    # Keys longer than the published models' would not fit twice into the shared memory of small cards.
    options = {"num_warps": 4, "num_stages": 2} if shape["KEY_DIM"] <= 128 else {"num_warps": 8, "num_stages": 1}
    chunk_kernel[(table.num_chunks, num_heads)](
        factors,
        matrices,
        *(mixed, decay, beta, decay_scale, decay_bias),
        table.sequences,
        table.chunks,
        shape["KEY_DIM"] ** -0.5,
        num_tokens,
        num_heads,
        *(mixed.stride(0), decay.stride(0), beta.stride(0)),
        **shape,
        TOKENS=CHUNK,
        DOUBLES_BETA=doubles_beta,
        num_warps=options["num_warps"],
        **early_launch(mixed.device),
    )
    values = min(next_power_of_2(value_dim), _CHUNK_VALUES)
    scan_kernel[(num_heads * cdiv(value_dim, values), table.num_sequences - table.num_few)](
        output,
        states,
        mixed,
        factors,
        matrices,
        table.sequences[table.num_few :],
        num_tokens,
        num_heads,
        mixed.stride(0),
        **shape,
        VALUE_DIM=value_dim,
        VALUES=values,
        TOKENS=CHUNK,
        **options,
        **early_launch(mixed.device),
    )


def _check_rule(
    mixed: Tensor,
    decay: Tensor,
    beta: Tensor,
    decay_scale: Tensor,
    decay_bias: Tensor,
    states: Tensor,
    slots: StateSlots,
) -> int:
    """How many heads a key head serves, when all fits together."""
    check_launch("mixed", mixed, recurrent_rule_kernel)
    check_tensor("mixed", mixed, (slots.num_tokens, None), FLOAT_DTYPES, mixed.device, is_contiguous=False)
    check_tensor("states", states, (None, None, None, None), (torch.float32,), mixed.device)
    _, num_heads, key_dim, value_dim = states.shape
    if key_dim not in HEAD_DIMS or value_dim not in HEAD_DIMS:
        raise ValueError(
            f"states {tuple(states.shape)} has a key_dim of {key_dim} and a value_dim of {value_dim}: both must be "
            f"{HEAD_DIMS.start} to {HEAD_DIMS.stop - 1}"
        )
    num_key_heads = num_key_heads_of(mixed, states)
    for name, tensor in (("decay", decay), ("beta", beta)):
        wanted = (slots.num_tokens, num_heads)
        check_tensor(name, tensor, wanted, (mixed.dtype,), mixed.device, is_contiguous=False)
    for name, tensor in (("decay_scale", decay_scale), ("decay_bias", decay_bias)):
        check_tensor(name, tensor, (num_heads,), (torch.float32,), mixed.device)
    slots.check_device(mixed.device)
    return num_heads // num_key_heads


def gated_rms_norm_triton(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `gated_rms_norm`."""
    check_launch("x", x, gated_rms_norm_kernel)
    check_tensor("x", x, (None, None, None), FLOAT_DTYPES, x.device)
    num_tokens, num_heads, size = x.shape
    same = ((x.dtype,), x.device)
    check_tensor("gate", gate, (num_tokens, num_heads * size), *same, is_contiguous=False)
    check_tensor("weight", weight, (size,), *same)
    output = torch.empty_like(x)
    num_rows = num_tokens * num_heads
    if not num_rows:
        return output
    padded = next_power_of_2(size)
    rows = max(_NUMBERS_PER_PROGRAM // padded, 1)
    gated_rms_norm_kernel[(cdiv(num_rows, rows),)](
        output,
        x,
        gate,
        weight,
        eps,
        num_rows,
        num_heads,
        gate.stride(0),
        SIZE=size,
        PADDED_SIZE=padded,
        ROWS=rows,
        num_warps=4,
        **early_launch(x.device),
    )
    return output
