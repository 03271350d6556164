"""The shapes that attention's kernel is compiled in, by the shared memory that a GPU has for them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache

import torch

from ..device import RESERVED_SHARED_BYTES, UnsupportedGpuError
from ..launch_sizes import next_power_of_2

# What a program may have on Hopper and on data centres' Blackwell. GPUs with less have other instructions to multiply.
_HOPPER_SHARED_BYTES = 227 * 1024
# The sums of larger heads take as many registers as latents', and with keys that are not values no more rows have any
# to themselves (read in the machine's code, not measured).
_MOST_DIMS, _MOST_LARGE_ROWS = 256, 32
# Of prefill chunks and shared prefixes: what Hopper's own kernel has (`triton_hopper_kernel.py`).
WIDE_ROWS = 128
# Of a program, for what its warps tell each other.
_OTHER_SHARED_BYTES = 2048


@dataclass(frozen=True)
class KernelShape:
    """One of the attention kernel's two shapes: rows of a Q-block, keys at a time, and how it is compiled.

    A tile's keys are found by way of the block table, and each of the two loads takes stages of the pipeline: it needs
    five before a second tile is on its way while one is computed, and seven before a third (seen in the shared memory
    of what was compiled). max_registers: what a thread may take.
    """

    rows: int
    tile: int
    num_warps: int
    num_stages: int
    programs_per_processor: int
    max_registers: int

    def shared_bytes(self, head_dim: int, dtype: torch.dtype, key_rest: int = 0) -> int:
        """What a program takes at most before Hopper: queries, weights, and the tiles that are under way of both.

        `key_rest`: what keys have behind those of their numbers that are the values; there is one tile for both then.
        """
        padded_dim, num_tiles = next_power_of_2(head_dim), 2 * ((self.num_stages - 1) // 2)
        if key_rest:
            padded_dim, num_tiles = padded_dim + max(16, next_power_of_2(key_rest)), num_tiles // 2
        numbers = (self.rows + num_tiles * self.tile) * padded_dim + self.rows * self.tile
        return numbers * dtype.itemsize + _OTHER_SHARED_BYTES


@dataclass(frozen=True)
class KernelShapes:
    """narrow: for one or a few queries, where reading keys is all the work. wide: for prefill chunks and shared
    prefixes, where the products are."""

    narrow: KernelShape
    wide: KernelShape


@cache
def choose_kernels(group: int, head_dim: int, dtype: torch.dtype, shared: int, reads_fp8: bool = False) -> KernelShapes:
    """The shapes for heads of this size, `group` of them to a KV head, where a program may have `shared` bytes.

    `reads_fp8`: the cache is in 8 bits, which changes how many keys a tile has, and nothing that a plan depends on.
    Raises `UnsupportedGpuError` where that is not enough for any.
    """
    group = next_power_of_2(group)
    if head_dim > _MOST_DIMS:
        most = min(_MOST_LARGE_ROWS, most_latent_rows(dtype, shared))
        return _of_long_sums(max(16, group), max(group, most), head_dim, 0, dtype, shared)
    if shared >= _HOPPER_SHARED_BYTES:
        return _hopper(group, head_dim, dtype, reads_fp8)
    narrow, wide = _narrow_with_less(group, head_dim, dtype), _wide_with_less(group, head_dim, dtype)
    return KernelShapes(*(_first_that_fits(shapes, head_dim, dtype, shared) for shapes in (narrow, wide)))


def most_latent_rows(dtype: torch.dtype, shared: int) -> int:
    """How many queries a program may have where a value is a latent: their sums take half of all registers."""
    if dtype == torch.float32:
        return 16
    return 64 if shared >= _HOPPER_SHARED_BYTES else 32


@cache
def choose_latent_kernels(group: int, head_dim: int, key_rest: int, dtype: torch.dtype, shared: int) -> KernelShapes:
    """As `choose_kernels`, where values are latents of `head_dim` numbers, and keys have `key_rest` more.

    group: no more than `most_latent_rows`.
    """
    rows = max(16, next_power_of_2(group))
    return _of_long_sums(rows, most_latent_rows(dtype, shared), head_dim, key_rest, dtype, shared)


def _of_long_sums(
    narrow_rows: int, wide_rows: int, head_dim: int, key_rest: int, dtype: torch.dtype, shared: int
) -> KernelShapes:
    """With any of these tiles what the loop goes on with stays in registers, as is read in the machine's code for sums
    of 512 numbers; but for a few where float32 has heads so large and 99 KiB."""

    def of_rows(rows: int) -> KernelShape:
        # Keys at a time, and stages. Of 64 rows the sums go through shared memory on a B200, which takes what is left.
        sizes = ((16, 5), (16, 3)) if dtype == torch.float32 else ((32, 5 if rows < 64 else 3), (16, 5), (16, 3))
        shapes = [KernelShape(rows, tile, 8, stages, 1, 255) for tile, stages in sizes]
        return _first_that_fits(shapes, head_dim, dtype, shared, key_rest)

    return KernelShapes(of_rows(narrow_rows), of_rows(wide_rows))


def _hopper(group: int, head_dim: int, dtype: torch.dtype, reads_fp8: bool) -> KernelShapes:
    """In 16 bits chosen by measurement on an H200 (`docs/decisions.md`)."""
    rows, wide_rows = max(16, group), max(WIDE_ROWS, group)
    if dtype == torch.float32:
        # There are no tensor cores for it.
        narrow = KernelShape(rows, 32, 4, 5, 2, 255)
        return KernelShapes(narrow, replace(narrow, rows=max(32, group), programs_per_processor=1))
    wide = KernelShape(wide_rows, 64, 8, 3, 1, 255) if head_dim > 128 else KernelShape(wide_rows, 128, 8, 5, 1, 255)
    if rows > 16:
        # Not measured: that many need the registers of several warps.
        few, many = KernelShape(rows, 32, 4, 7, 4, 128), KernelShape(rows, 32, 4, 5, 2, 255)
        return KernelShapes(few if head_dim <= 128 else many, wide)
    # Warps that wait for nobody but memory read faster than as many that wait for each other.
    if head_dim > 128:
        return KernelShapes(KernelShape(rows, 32, 2, 3, 4, 255), wide)
    is_small = reads_fp8 or head_dim <= 64
    return KernelShapes(KernelShape(rows, 32, 1, 5, 8, 255) if is_small else KernelShape(rows, 16, 1, 3, 8, 255), wide)


def _narrow_with_less(group: int, head_dim: int, dtype: torch.dtype) -> list[KernelShape]:
    is_small = head_dim <= 128 and dtype != torch.float32
    registers, programs = (128, (4, 2, 1)) if is_small else (255, (2, 1))
    shapes = [KernelShape(max(16, group), 32, 4, 5, number, registers) for number in programs]
    return [*shapes, replace(shapes[-1], tile=16)]


def _wide_with_less(group: int, head_dim: int, dtype: torch.dtype) -> list[KernelShape]:
    """In 16 bits, rows and tiles that leave every number in a register. 128 rows by 32 keys is also what
    FlashAttention-2 has on sm_86 and sm_89 where nothing is masked."""
    num_warps, sizes = 8, [(128, 64), (128, 32)] if head_dim <= 128 else [(64, 32), (64, 16)]
    if dtype == torch.float32:
        num_warps, sizes = 4, [(32, 32), (16, 32), (16, 16)]
    return [KernelShape(max(rows, group), tile, num_warps, 5, 1, 255) for rows, tile in sizes]


def _first_that_fits(
    shapes: Iterable[KernelShape], head_dim: int, dtype: torch.dtype, shared: int, key_rest: int = 0
) -> KernelShape:
    """The first of which a processor has room for all the programs."""
    needed = 0
    for shape in shapes:
        needed = shape.shared_bytes(head_dim, dtype, key_rest)
        # A processor has what one program may have, and what is reserved for that one.
        if shape.programs_per_processor * (needed + RESERVED_SHARED_BYTES) <= shared + RESERVED_SHARED_BYTES:
            return shape
    name = str(dtype).removeprefix("torch.")
    remedy = "set dtype=bfloat16" if dtype == torch.float32 else "set device=cpu, or choose another GPU or model"
    raise UnsupportedGpuError(
        f"attention in {name} with heads of {head_dim} needs {needed // 1024} KiB of shared memory, and the GPU has "
        f"{shared // 1024} KiB for a program: {remedy}"
    )
