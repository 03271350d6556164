"""How the formats lay out four-bit weights on disk, read into plain values."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.weight_memory import empty_weight
from ..checkpoints.cut import Axes, Axis
from ..checkpoints.gguf.block_types import BLOCK_TYPES, BlockType
from ..checkpoints.gguf.blocks import q4_0, q4_1, q4_k, q5_0, q6_k, q8_0
from ..checkpoints.quantization_schemes import Int4Scheme
from ..checkpoints.weights import WeightSlot

_PER_WORD = 8
# The columns that an AWQ word has, from its lowest four bits on: 0, 2, 4, 6, 1, 3, 5, 7. This is where each column is.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
_SYMMETRIC_ZERO = 8
# What is read is freed matrix by matrix: in memory that goes back to the system then.
_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Int4Values:
    """values: [out, in] uint8; scales: [num_groups, out]; zeros: [num_groups, out], as `Int4Weight` has them."""

    values: Tensor
    scales: Tensor
    zeros: Tensor


class Int4Layout(Protocol):
    """A format's tensors of one module."""

    def blank(self, scheme: Int4Scheme, num_outputs: int, num_inputs: int) -> list[WeightSlot]:
        """What there is to fill, by the last parts of the names."""

    def read(self, scheme: Int4Scheme, tensors: dict[str, Tensor], num_inputs: int) -> Int4Values:
        """What the filled tensors say. Raises `ValueError` where they contradict each other."""


class GptqLayout:
    """AutoGPTQ's and GPTQModel's: words of eight inputs, scales and zeros by group."""

    def blank(self, scheme: Int4Scheme, num_outputs: int, num_inputs: int) -> list[WeightSlot]:
        _require_words(in_features=num_inputs, out_features=num_outputs)
        num_groups = _num_groups(scheme, num_inputs)
        group = torch.arange(num_inputs, dtype=torch.int32) // (scheme.group_size or num_inputs)
        by_group = _groups(scheme, 0)
        return [
            _words("qweight", num_inputs // _PER_WORD, num_outputs, Axes(Axis(1), Axis(0, _PER_WORD))),
            _words("qzeros", num_groups, num_outputs // _PER_WORD, Axes(Axis(1, _PER_WORD), by_group)),
            _scales("scales", num_inputs, num_groups, num_outputs, Axes(Axis(1), by_group)),
            # Written by most, also where it says nothing.
            WeightSlot("g_idx", group, is_optional=not scheme.has_order or num_groups == 1, is_drawn=False),
        ]

    def read(self, scheme: Int4Scheme, tensors: dict[str, Tensor], num_inputs: int) -> Int4Values:
        zeros = _nibbles(tensors["qzeros"])
        # Some writers of symmetric weights store the zeros as they are and call it the first format nevertheless.
        is_plain = scheme.is_symmetric and bool((zeros == _SYMMETRIC_ZERO).all())
        if scheme.are_zeros_less_one and not is_plain:
            zeros = zeros + 1
        return Int4Values(_nibbles(tensors["qweight"].t()), tensors["scales"], zeros)


class AwqLayout:
    """AutoAWQ's for its GEMM kernels: words of eight outputs in an order of their own."""

    def blank(self, scheme: Int4Scheme, num_outputs: int, num_inputs: int) -> list[WeightSlot]:
        _require_words(out_features=num_outputs)
        num_groups = _num_groups(scheme, num_inputs)
        by_group = _groups(scheme, 0)
        return [
            _words("qweight", num_inputs, num_outputs // _PER_WORD, Axes(Axis(1, _PER_WORD), Axis(0))),
            _words("qzeros", num_groups, num_outputs // _PER_WORD, Axes(Axis(1, _PER_WORD), by_group)),
            _scales("scales", num_inputs, num_groups, num_outputs, Axes(Axis(1), by_group)),
        ]

    def read(self, scheme: Int4Scheme, tensors: dict[str, Tensor], num_inputs: int) -> Int4Values:
        values, zeros = (_in_place(_nibbles(tensors[name])) for name in ("qweight", "qzeros"))
        return Int4Values(values.t(), tensors["scales"], zeros)


class CompressedLayout:
    """compressed-tensors' `pack-quantized`: words of eight inputs, scales by output, values moved up by eight."""

    def blank(self, scheme: Int4Scheme, num_outputs: int, num_inputs: int) -> list[WeightSlot]:
        num_groups = _num_groups(scheme, num_inputs)
        num_words, num_zero_words = -(-num_inputs // _PER_WORD), -(-num_outputs // _PER_WORD)
        by_group, shape = _groups(scheme, 1), torch.tensor([num_outputs, num_inputs])
        slots = [
            _words("weight_packed", num_outputs, num_words, Axes(Axis(0), Axis(1, _PER_WORD))),
            _scales("weight_scale", num_inputs, num_outputs, num_groups, Axes(Axis(0), by_group)),
            WeightSlot("weight_shape", shape, is_drawn=False),
        ]
        if not scheme.is_symmetric:
            slots.append(_words("weight_zero_point", num_zero_words, num_groups, Axes(Axis(0, _PER_WORD), by_group)))
        if scheme.has_order:
            group = torch.arange(num_inputs, dtype=torch.int32) // (scheme.group_size or num_inputs)
            slots.append(WeightSlot("weight_g_idx", group, is_drawn=False))
        return slots

    def read(self, scheme: Int4Scheme, tensors: dict[str, Tensor], num_inputs: int) -> Int4Values:
        scales = tensors["weight_scale"].t()
        num_outputs = scales.shape[1]
        if tensors["weight_shape"].tolist() != [num_outputs, num_inputs]:
            found = tuple(tensors["weight_shape"].tolist())
            raise ValueError(f"weight_shape is {found}; config.json asks for {(num_outputs, num_inputs)}")
        if scheme.is_symmetric:
            zeros = torch.full_like(scales, _SYMMETRIC_ZERO, dtype=torch.uint8)
        else:
            zeros = _nibbles(tensors["weight_zero_point"].t())[:, :num_outputs]
        return Int4Values(_nibbles(tensors["weight_packed"])[:, :num_inputs], scales, zeros)


@dataclass(frozen=True)
class BlocksLayout:
    """GGUF's: an output is a row of blocks. `unpacked` gives values, scales and zeros of each."""

    kind: BlockType
    unpacked: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]

    def blank(self, scheme: Int4Scheme, num_outputs: int, num_inputs: int) -> list[WeightSlot]:
        return _rows_of_blocks(self.kind, num_outputs, num_inputs)

    def read(self, scheme: Int4Scheme, tensors: dict[str, Tensor], num_inputs: int) -> Int4Values:
        rows = tensors["weight"]
        values, *factors = self.unpacked(rows.flatten(0, 1))
        scales, zeros = (each.reshape(len(rows), -1).t() for each in factors)
        return Int4Values(values.view(len(rows), -1), scales, zeros)


@dataclass(frozen=True)
class ByteBlocksLayout:
    """GGUF's blocks of up to eight bits a weight. `unpacked` gives values in int8 and scales of each."""

    kind: BlockType
    unpacked: Callable[[Tensor], tuple[Tensor, Tensor]]

    def blank(self, num_outputs: int, num_inputs: int) -> list[WeightSlot]:
        """See `Int4Layout`."""
        return _rows_of_blocks(self.kind, num_outputs, num_inputs)

    def read(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Values [out, in] int8 and scales [out, num_groups] float32."""
        rows = tensors["weight"]
        values, scales = self.unpacked(rows.flatten(0, 1))
        return values.reshape(len(rows), -1), scales.reshape(len(rows), -1)


def _symmetric(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, scales = q4_0(blocks)
    return values, scales, torch.full_like(scales, _SYMMETRIC_ZERO, dtype=torch.uint8)


def _rounded(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales and minima, which are of six bits times a float16, rounded to float16."""
    values, scales, minima = q4_k(blocks)
    return values, scales.half(), minima.half()


_BLOCK_TYPES = {each.name: each for each in BLOCK_TYPES.values()}
INT4_LAYOUTS: dict[str, Int4Layout] = {
    "gptq": GptqLayout(),
    "awq": AwqLayout(),
    "compressed-tensors": CompressedLayout(),
    "Q4_0": BlocksLayout(_BLOCK_TYPES["Q4_0"], _symmetric),
    "Q4_1": BlocksLayout(_BLOCK_TYPES["Q4_1"], q4_1),
    "Q4_K": BlocksLayout(_BLOCK_TYPES["Q4_K"], _rounded),
}
BYTE_LAYOUTS = {
    "Q5_0": ByteBlocksLayout(_BLOCK_TYPES["Q5_0"], q5_0),
    "Q8_0": ByteBlocksLayout(_BLOCK_TYPES["Q8_0"], q8_0),
    "Q6_K": ByteBlocksLayout(_BLOCK_TYPES["Q6_K"], q6_k),
}


def _rows_of_blocks(kind: BlockType, num_outputs: int, num_inputs: int) -> list[WeightSlot]:
    shape = (num_outputs, num_inputs // kind.num_weights, kind.num_bytes)
    axes = Axes(Axis(0), Axis(1, kind.num_weights))
    return [WeightSlot("weight", empty_weight(shape, torch.uint8, _HOST), axes=axes)]


def _num_groups(scheme: Int4Scheme, num_inputs: int) -> int:
    return -(-num_inputs // (scheme.group_size or num_inputs))


def _groups(scheme: Int4Scheme, dim: int) -> Axis | None:
    """Where a tensor has the inputs' groups, if there is more than one."""
    return None if scheme.group_size is None else Axis(dim, scheme.group_size)


def _words(name: str, rows: int, columns: int, axes: Axes) -> WeightSlot:
    return WeightSlot(name, empty_weight((rows, columns), torch.int32, _HOST), axes=axes)


def _scales(name: str, num_inputs: int, rows: int, columns: int, axes: Axes) -> WeightSlot:
    """Drawn such that a row of random values, some six apart, has a length of about one."""
    drawn = num_inputs**-0.5 / 6
    return WeightSlot(name, torch.empty(rows, columns), constant=drawn, constant_shrinks=True, axes=axes)


def _nibbles(words: Tensor) -> Tensor:
    """[n, words] int32 to [n, 8 * words] uint8, the lowest four bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts & 15).to(torch.uint8).flatten(1)


def _in_place(columns: Tensor) -> Tensor:
    return columns.view(len(columns), -1, _PER_WORD)[:, :, _AWQ_PLACES].flatten(1)


def _require_words(**sizes: int) -> None:
    for name, size in sizes.items():
        if size % _PER_WORD:
            raise ValueError(f"{name} {size} is no multiple of {_PER_WORD}, which its words hold")
