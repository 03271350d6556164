"""Low-rank additions on the GPU: checks, and launches."""

import torch
from torch import Tensor

from ..device import num_processors
from ..launch_sizes import cdiv, next_power_of_2
from ..triton_checks import FLOAT_DTYPES, check_launch, check_tensor
from ..triton_early_launch import early_launch
from .matrices import OUTPUTS, AdapterMatrices
from .token_tiles import FEW_ROWS, TokenTiles
from .triton_kernels import expand_kernel, shrink_kernel

_INPUTS = 64
_MAX_RANK_TILE = 64
_PROGRAMS_PER_PROCESSOR = 4
# With few tiles of tokens, splits of the inputs are what fills a GPU; each has so many inputs at least.
_INPUTS_PER_SPLIT = 512
_MAX_SPLITS = 8


def add_low_rank_triton(output: Tensor, x: Tensor, matrices: AdapterMatrices, tiles: TokenTiles) -> None:
    """Add to each token's row of `output` [n, out] what its adapter makes of `x` [n, in]: x @ downᵀ @ up.

    Rows of tokens without an adapter are not read. The launches depend on sizes alone, and never on who has what.
    """
    _check(output, x, matrices, tiles)
    _, num_parts, max_rank, num_inputs = matrices.down.shape
    rank_tile = min(max(next_power_of_2(max_rank), 16), _MAX_RANK_TILE)
    splits = max(1, min(num_inputs // _INPUTS_PER_SPLIT, _MAX_SPLITS)) if tiles.rows == FEW_ROWS else 1
    low = torch.empty(splits, tiles.num_tokens, num_parts, max_rank, dtype=torch.float32, device=x.device)
    programs = num_processors(x.device) * _PROGRAMS_PER_PROCESSOR
    shared = {
        "PARTS": num_parts,
        "MAX_RANK": max_rank,
        "SPLITS": splits,
        "ROWS": tiles.rows,
        "RANK_TILE": rank_tile,
        # Exact products in float32, as everywhere.
        "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
    }
    read = (tiles.num_tiles, tiles.tiles, tiles.tokens, tiles.num_tokens)
    units = tiles.max_tiles * num_parts * cdiv(max_rank, rank_tile) * splits
    shrink_kernel[(min(units, programs),)](
        low,
        x,
        matrices.down,
        matrices.ranks,
        *read,
        num_inputs,
        cdiv(cdiv(num_inputs, splits), _INPUTS) * _INPUTS,
        x.stride(0),
        INPUTS=_INPUTS,
        num_warps=4,
        # Tiles of few rows are few bytes: more are to be under way.
        num_stages=4 if tiles.rows == FEW_ROWS else 3,
        **shared,
        **early_launch(x.device),
    )
    num_column_tiles = len(matrices.column_tiles)
    expand_kernel[(min(tiles.max_tiles * num_column_tiles, programs),)](
        output,
        low,
        matrices.up,
        matrices.ranks,
        matrices.column_tiles,
        *read,
        num_column_tiles,
        matrices.up.shape[2],
        output.stride(0),
        ARE_ALIGNED=matrices.are_aligned,
        OUTPUTS=OUTPUTS,
        num_warps=4,
        num_stages=2,
        **shared,
        **early_launch(x.device),
    )


def _check(output: Tensor, x: Tensor, matrices: AdapterMatrices, tiles: TokenTiles) -> None:
    check_launch("x", x, shrink_kernel)
    num_slots, num_parts, max_rank, num_inputs = matrices.down.shape
    check_tensor("x", x, (tiles.num_tokens, num_inputs), FLOAT_DTYPES, x.device, is_contiguous=False)
    wanted = (tiles.num_tokens, matrices.up.shape[2])
    check_tensor("output", output, wanted, (x.dtype,), x.device, is_contiguous=False)
    check_tensor("matrices.down", matrices.down, (None, None, None, None), (x.dtype,), x.device)
    check_tensor("matrices.up", matrices.up, (num_slots, max_rank, None), (x.dtype,), x.device)
    check_tensor("matrices.ranks", matrices.ranks, (num_slots, num_parts), (torch.int32,), x.device)
    check_tensor("tiles.memory", tiles.memory, (None,), (torch.int32,), x.device)
