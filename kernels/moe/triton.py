"""A mixture's experts on the GPU: checks, and launches."""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ..device import shared_bytes
from ..linear.gates import Gate
from ..triton_checks import FLOAT_DTYPES, check_launch, check_tensor
from .stacked_experts import StackedExperts
from .triton_kernels import choose_experts_kernel, expert_rows_kernel, mix_rows_kernel, sort_pairs_kernel

_LOGITS_PER_PROGRAM = 1024
_PAIRS_PER_STEP = 1024
_COLUMNS_PER_PROGRAM = 1024
_TILE_SIZE = 3
_INPUTS = 64
# Without tensor cores fewer fit into the registers.
_FLOAT32_INPUTS = 32
_MAX_STAGES = 4
# Of shared memory, for other things than tiles.
_OTHER_SHARED_BYTES = 1024


@dataclass(frozen=True)
class ExpertTile:
    """What one program computes at a time: so many pairs, and so many rows of a matrix, or of both of the first two."""

    rows: int
    outputs: int
    num_warps: int

    def num_stages(self, inputs: int, num_bytes: int, shared: int) -> int:
        """How many tiles of all factors are under way at a time, with so many bytes a number and of shared memory."""
        return max(
            2, min(_MAX_STAGES, (shared - _OTHER_SHARED_BYTES) // ((self.rows + self.outputs) * inputs * num_bytes))
        )


# A decode: an expert has a few tokens, and memory limits.
_FEW_ROWS = ExpertTile(16, 128, num_warps=4)
_SOME_ROWS = ExpertTile(64, 128, num_warps=4)
_MANY_ROWS = ExpertTile(128, 128, num_warps=8)
# For Hopper's memory, and its tensor cores, which read the factors from there and leave the registers to the sums.
_WIDE_ROWS = ExpertTile(128, 256, num_warps=8)
_FLOAT32_ROWS = ExpertTile(16, 64, num_warps=4)


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


def choose_experts_triton(router_logits: Tensor, num_chosen: int, normalise: bool) -> tuple[Tensor, Tensor]:
    """See `choose_experts`."""
    check_launch("router_logits", router_logits, choose_experts_kernel)
    check_tensor("router_logits", router_logits, (None, None), FLOAT_DTYPES, router_logits.device, is_contiguous=False)
    num_tokens, num_experts = router_logits.shape
    if not 1 <= num_chosen <= num_experts:
        raise ValueError(
            f"num_chosen {num_chosen} for router_logits {tuple(router_logits.shape)} must be 1 to {num_experts}"
        )
    ids = torch.empty(num_tokens, num_chosen, dtype=torch.int64, device=router_logits.device)
    shares = torch.empty(num_tokens, num_chosen, dtype=torch.float32, device=router_logits.device)
    if num_tokens:
        padded = triton.next_power_of_2(num_experts)
        tokens = max(_LOGITS_PER_PROGRAM // padded, 1)
        choose_experts_kernel[(triton.cdiv(num_tokens, tokens),)](
            ids,
            shares,
            router_logits,
            num_tokens,
            router_logits.stride(0),
            NUM_EXPERTS=num_experts,
            CHOSEN=num_chosen,
            NORMALISE=normalise,
            TOKENS=tokens,
            PADDED_EXPERTS=padded,
            PADDED_CHOSEN=triton.next_power_of_2(num_chosen),
            num_warps=4,
        )
    return ids, shares


def mix_stacked_experts_triton(x: Tensor, experts: StackedExperts, ids: Tensor, shares: Tensor) -> Tensor:
    """See `mix_stacked_experts`. The launches depend on sizes alone, and never on who goes where."""
    _check(x, experts, ids, shares)
    num_tokens, size = x.shape
    num_chosen = ids.shape[1]
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not num_tokens:
        return output
    tile = expert_tile(ids.numel(), experts.num_experts, x.dtype, shared_bytes(x.device))
    pairs, tiles = _sort(ids, experts.num_experts, tile.rows)
    inside = torch.empty(ids.numel(), experts.inner_size, dtype=x.dtype, device=x.device)
    _multiply(inside, x, experts.gate_up, pairs, tiles, num_chosen, tile, experts.gate)
    outside = torch.empty(ids.numel(), size, dtype=x.dtype, device=x.device)
    _multiply(outside, inside, experts.down, pairs, tiles, num_chosen, tile, Gate.NONE)
    mix_rows_kernel[(num_tokens, triton.cdiv(size, _COLUMNS_PER_PROGRAM))](
        output, outside, shares, size, CHOSEN=num_chosen, COLUMNS=_COLUMNS_PER_PROGRAM, num_warps=4
    )
    return output


def _sort(ids: Tensor, num_experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """The pairs in their experts' order, [num_pairs] int32, and the tiles of so many that they are cut into."""
    num_pairs = ids.numel()
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=ids.device)
    tiles = torch.empty(num_pairs // rows + num_experts, _TILE_SIZE, dtype=torch.int32, device=ids.device)
    sort_pairs_kernel[(num_experts,)](
        pairs, tiles, ids, num_pairs, NUM_EXPERTS=num_experts, ROWS=rows, PAIRS=_PAIRS_PER_STEP, num_warps=4
    )
    return pairs, tiles


def _multiply(
    output: Tensor,
    x: Tensor,
    weight: Tensor,
    pairs: Tensor,
    tiles: Tensor,
    num_chosen: int,
    tile: ExpertTile,
    gate: Gate,
) -> None:
    """Each pair's row times its expert's matrix: gated from the tokens' rows, or not, from those in sorted order."""
    is_gated, is_float32 = gate is not Gate.NONE, x.dtype == torch.float32
    num_outputs, num_inputs = output.shape[1], x.shape[1]
    outputs = tile.outputs // 2 if is_gated else tile.outputs
    inputs = _FLOAT32_INPUTS if is_float32 else _INPUTS
    num_column_tiles = triton.cdiv(num_outputs, outputs)
    expert_rows_kernel[(len(tiles) * num_column_tiles,)](
        output,
        x,
        weight,
        pairs,
        tiles,
        num_outputs,
        num_inputs,
        num_column_tiles,
        x.stride(0),
        CHOSEN=num_chosen,
        IS_GATED=is_gated,
        IS_SILU=gate is Gate.SILU,
        IS_WHOLE=num_inputs % inputs == 0,
        # Exact products in float32, as everywhere.
        PRECISION="ieee" if is_float32 else "tf32",
        ROWS=tile.rows,
        OUTPUTS=outputs,
        INPUTS=inputs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages(inputs, x.element_size(), shared_bytes(x.device)),
    )


def _check(x: Tensor, experts: StackedExperts, ids: Tensor, shares: Tensor) -> None:
    check_launch("x", x, expert_rows_kernel)
    num_experts, inner = experts.num_experts, experts.inner_size
    check_tensor("x", x, (None, None), FLOAT_DTYPES, x.device, is_contiguous=False)
    num_tokens, size = x.shape
    check_tensor("experts.gate_up", experts.gate_up, (num_experts, 2 * inner, size), (x.dtype,), x.device)
    check_tensor("experts.down", experts.down, (num_experts, size, inner), (x.dtype,), x.device)
    if experts.gate is Gate.NONE:
        raise ValueError("experts.gate must be an activation")
    check_tensor("ids", ids, (num_tokens, None), (torch.int64,), x.device)
    check_tensor("shares", shares, tuple(ids.shape), (torch.float32,), x.device)
