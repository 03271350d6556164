"""A mixture's experts on the GPU: checks, and launches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..activation import relu_squared
from ..activation.triton import clamped_swiglu_triton, gelu_tanh_and_mul_triton, silu_and_mul_triton
from ..device import shared_bytes
from ..launch_sizes import cdiv, next_power_of_2
from ..linear.gates import Gate
from ..linear.triton import (
    BYTE_DTYPES,
    check_groups,
    int4_options,
    quantize_gated_triton,
    quantize_rows_triton,
    stages_in,
)
from ..linear.weights import BLOCK_OUTPUTS, HALF_TILE, KERNEL_GROUP_SIZE
from ..triton_checks import FLOAT_DTYPES, check_launch, check_tensor
from ..triton_early_launch import early_launch
from .expert_groups import ONE_GROUP, ExpertGroups
from .stacked_experts import (
    ByteMatrices,
    ClampedGate,
    ExpertGate,
    Fp4Matrices,
    Int4Matrices,
    Matrices,
    PlainMatrices,
    SquaredRelu,
    StackedExperts,
)
from .triton_kernels import (
    choose_experts_kernel,
    experts_kernel,
    gated_experts_kernel,
    int4_experts_kernel,
    mix_rows_kernel,
    scaled_experts_kernel,
    sort_pairs_kernel,
)

_LOGITS_PER_PROGRAM = 1024
_PAIRS_PER_STEP = 1024
_COLUMNS_PER_PROGRAM = 1024
_TILE_SIZE = 3
_INPUTS = 64
# Without tensor cores fewer fit into the registers.
_FLOAT32_INPUTS = 32
_MAX_STAGES = 4


@dataclass(frozen=True)
class ExpertTile:
    """What one program computes at a time: so many pairs, and so many rows of a matrix, or of both of the first two."""

    rows: int
    outputs: int
    num_warps: int

    def num_stages(self, inputs: int, num_bytes: int, shared: int) -> int:
        """How many tiles of all factors are under way at a time, with so many bytes a number and of shared memory."""
        return stages_in(shared, (self.rows + self.outputs) * inputs * num_bytes, _MAX_STAGES)


# A decode: an expert has a few tokens, and memory limits.
_FEW_ROWS = ExpertTile(16, 128, num_warps=4)
_SOME_ROWS = ExpertTile(64, 128, num_warps=4)
_MANY_ROWS = ExpertTile(128, 128, num_warps=8)
# For Hopper's memory, and its tensor cores, which read the factors from there and leave the registers to the sums.
_WIDE_ROWS = ExpertTile(128, 256, num_warps=8)
_FLOAT32_ROWS = ExpertTile(16, 64, num_warps=4)
# Hopper's tensor cores take 64 rows at least from 8-bit floats as they are.
_FEW_ROWS_OF_BYTES = ExpertTile(64, 128, num_warps=4)
_FEW_INT4_ROWS = ExpertTile(16, 64, num_warps=4)


def expert_tile(num_pairs: int, num_experts: int, dtype: torch.dtype, shared: int) -> ExpertTile:
    """The tile for so many pairs of a token and an expert: twice as long as an expert's share of them at most.

    shared: bytes of memory that a program may have.
    """
    if dtype == torch.float32:
        return _FLOAT32_ROWS
    share = num_pairs / num_experts
    if share < _MANY_ROWS.rows:
        return _FEW_ROWS if share < _SOME_ROWS.rows / 2 else _SOME_ROWS
    return _WIDE_ROWS if _WIDE_ROWS.num_stages(_INPUTS, dtype.itemsize, shared) == _MAX_STAGES else _MANY_ROWS


def choose_experts_triton(
    router_logits: Tensor,
    num_chosen: int,
    normalise: bool,
    correction: Tensor | None = None,
    scale: float = 1.0,
    are_sigmoids: bool = True,
    groups: ExpertGroups = ONE_GROUP,
) -> tuple[Tensor, Tensor]:
    """See `choose_experts`."""
    check_launch("router_logits", router_logits, choose_experts_kernel)
    check_tensor("router_logits", router_logits, (None, None), FLOAT_DTYPES, router_logits.device, is_contiguous=False)
    num_tokens, num_experts = router_logits.shape
    if not 1 <= num_chosen <= num_experts:
        raise ValueError(
            f"num_chosen {num_chosen} for router_logits {tuple(router_logits.shape)} must be 1 to {num_experts}"
        )
    if num_experts % groups.number or not 1 <= groups.num_chosen <= groups.number:
        raise ValueError(
            f"groups {groups} must divide the {num_experts} experts of router_logits {tuple(router_logits.shape)}, and "
            "choose 1 or more of them, but not more than there are"
        )
    if correction is not None:
        check_tensor("correction", correction, (num_experts,), (torch.float32,), router_logits.device)
    ids = torch.empty(num_tokens, num_chosen, dtype=torch.int64, device=router_logits.device)
    shares = torch.empty(num_tokens, num_chosen, dtype=torch.float32, device=router_logits.device)
    if num_tokens:
        padded = next_power_of_2(num_experts)
        tokens = max(_LOGITS_PER_PROGRAM // padded, 1)
        choose_experts_kernel[(cdiv(num_tokens, tokens),)](
            ids,
            shares,
            router_logits,
            shares if correction is None else correction,
            num_tokens,
            router_logits.stride(0),
            scale,
            NUM_EXPERTS=num_experts,
            CHOSEN=num_chosen,
            NORMALISE=normalise,
            IS_CORRECTED=correction is not None,
            ARE_SIGMOIDS=correction is not None and are_sigmoids,
            NUM_GROUPS=groups.number,
            CHOSEN_GROUPS=groups.num_chosen,
            TOKENS=tokens,
            PADDED_EXPERTS=padded,
            PADDED_CHOSEN=next_power_of_2(num_chosen),
            PADDED_GROUPS=next_power_of_2(groups.number),
            num_warps=4,
            **early_launch(ids.device),
        )
    return ids, shares


def mix_stacked_experts_triton(x: Tensor, experts: StackedExperts, ids: Tensor, shares: Tensor) -> Tensor:
    """See `mix_stacked_experts`. The launches depend on sizes alone, and never on who goes where."""
    _check(x, experts, ids, shares)
    num_tokens, size = x.shape
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not num_tokens:
        return output
    if isinstance(experts.gate_up, PlainMatrices):
        rows = _plain_rows(x, experts, ids)
    elif isinstance(experts.gate_up, ByteMatrices):
        rows = _rows_of_bytes(x, experts, ids)
    else:
        rows = _int4_rows(x, experts, ids)
    mix_rows_kernel[(num_tokens, cdiv(size, _COLUMNS_PER_PROGRAM))](
        output,
        rows,
        shares,
        size,
        CHOSEN=ids.shape[1],
        COLUMNS=_COLUMNS_PER_PROGRAM,
        num_warps=4,
        **early_launch(x.device),
    )
    return output


@dataclass(frozen=True)
class _Sorted:
    """Pairs of a token and one of its experts: [num_pairs] int32, in their experts' order; tiles: [n, 3] int32."""

    pairs: Tensor
    tiles: Tensor
    num_chosen: int

    @classmethod
    def of(cls, ids: Tensor, num_experts: int, rows: int) -> "_Sorted":
        """rows: how many pairs a tile has at most."""
        num_pairs = ids.numel()
        pairs = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
        tiles = torch.empty(num_pairs // rows + num_experts, _TILE_SIZE, dtype=torch.int32, device=ids.device)
        sort_pairs_kernel[(num_experts,)](
            pairs,
            tiles,
            ids,
            num_pairs,
            NUM_EXPERTS=num_experts,
            ROWS=rows,
            PAIRS=_PAIRS_PER_STEP,
            num_warps=4,
            **early_launch(ids.device),
        )
        return cls(pairs, tiles, ids.shape[1])

    def multiply(
        self, kernel: Any, factors: Sequence[Tensor], shape: tuple[int, int], outputs: int, like: Tensor, **rest: Any
    ) -> Tensor:
        """A row a pair, of the dtype of `like`: `kernel` on every tile and so many outputs at a time.

        shape: outputs and inputs of an expert's matrix. rest: what the kernel takes beside `factors` and sizes.
        """
        num_outputs, num_inputs = shape
        output = torch.empty(len(self.pairs), num_outputs, dtype=like.dtype, device=like.device)
        num_column_tiles = cdiv(num_outputs, outputs)
        kernel[(len(self.tiles) * num_column_tiles,)](
            output,
            *factors,
            self.pairs,
            self.tiles,
            num_outputs,
            num_inputs,
            num_column_tiles=num_column_tiles,
            CHOSEN=self.num_chosen,
            OUTPUTS=outputs,
            **rest,
            **early_launch(output.device),
        )
        return output


def _plain_rows(x: Tensor, experts: StackedExperts, ids: Tensor) -> Tensor:
    """What each pair's expert gives: [num_pairs, size], in the order of `ids`."""
    assert isinstance(experts.gate_up, PlainMatrices)
    assert isinstance(experts.down, PlainMatrices)
    tile = expert_tile(ids.numel(), experts.num_experts, x.dtype, shared_bytes(x.device))
    routed = _Sorted.of(ids, experts.num_experts, tile.rows)
    if isinstance(experts.gate, Gate) and experts.biases is None:
        inside = _multiply_gated(x, experts.gate_up, experts.gate, routed, tile)
    else:
        inside = _gated(_multiply_plain(x, experts, routed, tile, is_first=True), experts.gate)
    return _multiply_plain(inside, experts, routed, tile, is_first=False)


def _multiply_gated(x: Tensor, matrices: PlainMatrices, gate: Gate, routed: _Sorted, tile: ExpertTile) -> Tensor:
    """The first products and their activation at once."""
    _, num_outputs, num_inputs = matrices.shape
    return routed.multiply(
        gated_experts_kernel,
        (x, matrices.values),
        (num_outputs // 2, num_inputs),
        tile.outputs // 2,
        x,
        x_stride=x.stride(0),
        IS_SILU=gate is Gate.SILU,
        **_options(x, num_inputs, tile),
    )


def _multiply_plain(x: Tensor, experts: StackedExperts, routed: _Sorted, tile: ExpertTile, is_first: bool) -> Tensor:
    matrices, bias = _of_product(experts, is_first)
    assert isinstance(matrices, PlainMatrices)
    return routed.multiply(
        experts_kernel,
        (x, matrices.values, matrices.values if bias is None else bias),
        matrices.shape[1:],
        tile.outputs,
        x,
        x_stride=x.stride(0),
        IS_FIRST=is_first,
        HAS_BIAS=bias is not None,
        **_options(x, matrices.shape[2], tile),
    )


def _options(x: Tensor, num_inputs: int, tile: ExpertTile) -> dict[str, Any]:
    """What both kernels of plain matrices are compiled for."""
    is_float32 = x.dtype == torch.float32
    inputs = _FLOAT32_INPUTS if is_float32 else _INPUTS
    return {
        "IS_WHOLE": num_inputs % inputs == 0,
        # Exact products in float32, as everywhere.
        "PRECISION": "ieee" if is_float32 else "tf32",
        "ROWS": tile.rows,
        "INPUTS": inputs,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages(inputs, x.element_size(), shared_bytes(x.device)),
    }


def _of_product(experts: StackedExperts, is_first: bool) -> tuple[Matrices, Tensor | None]:
    """The matrices of the first or of the second product, and their biases."""
    gate_up_bias, down_bias = experts.biases or (None, None)
    return (experts.gate_up, gate_up_bias) if is_first else (experts.down, down_bias)


def _gated(gate_up: Tensor, gate: ExpertGate) -> Tensor:
    if isinstance(gate, SquaredRelu):
        return relu_squared(gate_up)
    if isinstance(gate, ClampedGate):
        return clamped_swiglu_triton(gate_up, gate.limit, gate.alpha)
    return silu_and_mul_triton(gate_up) if gate is Gate.SILU else gelu_tanh_and_mul_triton(gate_up)


def _rows_of_bytes(x: Tensor, experts: StackedExperts, ids: Tensor) -> Tensor:
    """See `_plain_rows`. Rows are quantised as those of `scaled_linear_triton` are."""
    assert isinstance(experts.gate_up, ByteMatrices)
    assert isinstance(experts.down, ByteMatrices)
    tile = _FEW_ROWS_OF_BYTES if ids.numel() < _MANY_ROWS.rows * experts.num_experts else _MANY_ROWS
    routed = _Sorted.of(ids, experts.num_experts, tile.rows)
    dtype = experts.gate_up.values.dtype
    values, scales = quantize_rows_triton(x, dtype, experts.gate_up.group_size)
    gate_up = _multiply_bytes(values, scales, experts.gate_up, routed, tile, x, is_first=True)
    if isinstance(experts.gate, Gate):
        values, scales = quantize_gated_triton(gate_up, dtype, experts.down.group_size, experts.gate)
    else:
        values, scales = quantize_rows_triton(_gated(gate_up, experts.gate), dtype, experts.down.group_size)
    return _multiply_bytes(values, scales, experts.down, routed, tile, x, is_first=False)


def _multiply_bytes(
    values: Tensor,
    scales: Tensor,
    matrices: ByteMatrices,
    routed: _Sorted,
    tile: ExpertTile,
    like: Tensor,
    is_first: bool,
) -> Tensor:
    return routed.multiply(
        scaled_experts_kernel,
        (values, scales, matrices.values, matrices.scales),
        matrices.shape[1:],
        tile.outputs,
        like,
        num_groups=matrices.num_groups,
        IS_FIRST=is_first,
        IS_GROUPED=matrices.num_groups > 1,
        HAS_BLOCKS=matrices.num_groups > 1 and matrices.has_blocks and BLOCK_OUTPUTS % tile.outputs == 0,
        IS_INT=values.dtype == torch.int8,
        IS_WHOLE=matrices.shape[2] % KERNEL_GROUP_SIZE == 0,
        ROWS=tile.rows,
        INPUTS=KERNEL_GROUP_SIZE,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages(KERNEL_GROUP_SIZE, 1, shared_bytes(like.device)),
    )


def _int4_rows(x: Tensor, experts: StackedExperts, ids: Tensor) -> Tensor:
    """See `_plain_rows`. The matrices are dequantised in the kernel."""
    tile = _int4_tile(ids.numel(), experts.num_experts, x.dtype)
    routed = _Sorted.of(ids, experts.num_experts, tile.rows)
    inside = _gated(_multiply_int4(x, experts, routed, tile, is_first=True), experts.gate)
    return _multiply_int4(inside, experts, routed, tile, is_first=False)


def _int4_tile(num_pairs: int, num_experts: int, dtype: torch.dtype) -> ExpertTile:
    share = num_pairs / num_experts
    if dtype == torch.float32 or share < _SOME_ROWS.rows / 2:
        return _FEW_INT4_ROWS
    return _SOME_ROWS if share < _MANY_ROWS.rows else _MANY_ROWS


def _multiply_int4(x: Tensor, experts: StackedExperts, routed: _Sorted, tile: ExpertTile, is_first: bool) -> Tensor:
    matrices, bias = _of_product(experts, is_first)
    assert isinstance(matrices, Int4Matrices | Fp4Matrices)
    num_groups, is_fp4 = matrices.scales.shape[1], isinstance(matrices, Fp4Matrices)
    return routed.multiply(
        int4_experts_kernel,
        (x, matrices.packed, matrices.scales, matrices.zeros, x if bias is None else bias),
        matrices.shape[1:],
        tile.outputs,
        x,
        num_groups=num_groups,
        x_stride=x.stride(0),
        IS_FIRST=is_first,
        HAS_BIAS=bias is not None,
        num_warps=tile.num_warps,
        **int4_options(matrices, num_groups, x.dtype, tile.rows, tile.outputs, is_fp4),
    )


def _check(x: Tensor, experts: StackedExperts, ids: Tensor, shares: Tensor) -> None:
    check_launch("x", x, experts_kernel)
    check_tensor("x", x, (None, None), FLOAT_DTYPES, x.device, is_contiguous=False)
    num_tokens, size = x.shape
    first = experts.inner_size if isinstance(experts.gate, SquaredRelu) else 2 * experts.inner_size
    _check_matrices("experts.gate_up", experts.gate_up, (experts.num_experts, first, size), x)
    _check_matrices("experts.down", experts.down, (experts.num_experts, size, experts.inner_size), x)
    if type(experts.gate_up) is not type(experts.down):
        raise ValueError("experts.gate_up and experts.down must be of one kind")
    if experts.gate is Gate.NONE:
        raise ValueError("experts.gate must be an activation")
    if experts.biases is not None:
        _check_biases(experts, x)
    check_tensor("ids", ids, (num_tokens, None), (torch.int64,), x.device)
    check_tensor("shares", shares, tuple(ids.shape), (torch.float32,), x.device)


def _check_biases(experts: StackedExperts, x: Tensor) -> None:
    if isinstance(experts.gate_up, ByteMatrices):
        raise ValueError("experts.biases must be None for matrices of bytes")
    for name, bias, matrices in zip(
        ("gate_up", "down"), experts.biases or (), (experts.gate_up, experts.down), strict=True
    ):
        check_tensor(f"experts.biases of {name}", bias, matrices.shape[:2], FLOAT_DTYPES, x.device)


def _check_matrices(name: str, matrices: Matrices, shape: tuple[int, int, int], x: Tensor) -> None:
    num_experts, num_outputs, num_inputs = shape
    if isinstance(matrices, PlainMatrices):
        check_tensor(f"{name}.values", matrices.values, shape, (x.dtype,), x.device)
        return
    if isinstance(matrices, ByteMatrices):
        of_groups = (num_experts, cdiv(num_inputs, matrices.group_size), num_outputs)
        if of_groups[1] > 1 and matrices.group_size != KERNEL_GROUP_SIZE:
            raise ValueError(
                f"{name}.group_size {matrices.group_size} must be {KERNEL_GROUP_SIZE}, or all {num_inputs} inputs"
            )
        check_tensor(f"{name}.values", matrices.values, shape, BYTE_DTYPES, x.device)
        check_tensor(f"{name}.scales", matrices.scales, of_groups, (torch.float32,), x.device)
        return
    num_bytes = cdiv(num_inputs, 2 * HALF_TILE) * HALF_TILE
    check_tensor(f"{name}.packed", matrices.packed, (num_experts, num_bytes, num_outputs), (torch.uint8,), x.device)
    of_groups = (num_experts, cdiv(num_inputs, matrices.group_size), num_outputs)
    check_groups(name, matrices, of_groups, x.device)
