"""Quantised weights on their way in: the checkpoint's tensors, then the layout of the kernels."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Generic, TypeVar

import torch
from torch import Tensor

from ...kernels.linear import Fp4Weight, Int4Weight, QuantizedWeight, ScaledWeight
from ..checkpoints.cut import OF_MATRIX, OF_OUTPUTS, WHOLE, Axes, Axis
from ..checkpoints.quantization_schemes import (
    NVFP4_GROUP,
    BlockScheme,
    ByteScheme,
    Int4Scheme,
    Nvfp4Scheme,
    WeightScheme,
)
from ..checkpoints.weights import WeightSlot
from ..errors import ModelError
from .layouts import BYTE_LAYOUTS, INT4_LAYOUTS, Int4Layout, Int4Values
from .mxfp4 import RANDOM_FP4_SIZE, fp4_values

_RANDOM_FACTOR = 64.0
_BYTE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}

Scheme = TypeVar("Scheme", bound=WeightScheme)


class StoredModules(ABC, Generic[Scheme]):
    """Modules that are quantised alike and multiplied as one, side by side. See `StoredWeight`.

    Their tensors wait where the checkpoint is read, on the CPU; what is read of them goes to `device`. orders: [size]
    int64, where the checkpoint has each output of a module; None: as it is to be.
    """

    def __init__(
        self,
        scheme: Scheme,
        names: Sequence[str],
        sizes: Sequence[int],
        num_inputs: int,
        dtype: torch.dtype,
        device: torch.device,
        orders: Sequence[Tensor | None] = (),
    ) -> None:
        self._scheme = scheme
        self._outputs = _joined(orders, sizes)
        self._names = names
        self.shape = (sum(sizes), num_inputs)
        self.dtype = dtype
        self._device = device
        self._parts = [self._blank(name, size) for name, size in zip(names, sizes, strict=True)]

    def slots(self) -> Iterator[WeightSlot]:
        for name, part in zip(self._names, self._parts, strict=True):
            for slot in part:
                yield replace(slot, name=f"{name}.{slot.name}")

    def read(self) -> QuantizedWeight:
        """See `StoredWeight`. Raises `ModelError` naming the module whose tensors contradict each other."""
        weight = self._read()
        return weight if self._outputs is None else weight.with_outputs(self._outputs.to(self._device))

    @abstractmethod
    def _read(self) -> Int4Weight | Fp4Weight | ScaledWeight:
        """See `read`; with outputs as the checkpoint has them."""

    @abstractmethod
    def _blank(self, name: str, size: int) -> list[WeightSlot]:
        """A module's tensors, to be filled with the checkpoint's, by the last parts of their names.

        Raises `ModelError` where they have no room.
        """

    def _tensors(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        for name, part in zip(self._names, self._parts, strict=True):
            yield name, {slot.name: slot.destination for slot in part}


class StoredInt4(StoredModules[Int4Scheme]):
    """Four bits a weight, in any of the formats."""

    def _read(self) -> Int4Weight:
        parts, orders = [], []
        for name, tensors in self._tensors():
            try:
                parts.append(self._layout.read(self._scheme, tensors, self.shape[1]))
                orders.append(self._order(tensors))
            except ValueError as error:
                raise ModelError(f"{name}: {error}") from error
        if any(not torch.equal(order, orders[0]) for order in orders):
            raise ModelError(
                f"g_idx differs between {', '.join(self._names)}, which are multiplied as one: quantise them together, "
                "or without desc_act"
            )
        return self._packed(parts, orders[0])

    def _packed(self, parts: list[Int4Values], order: Tensor) -> Int4Weight:
        values = torch.cat([part.values for part in parts])[:, order]
        scales = _narrowed(torch.cat([part.scales for part in parts], dim=1))
        zeros = torch.cat([part.zeros for part in parts], dim=1)
        is_sorted = torch.equal(order, torch.arange(len(order)))
        values, scales, zeros = (tensor.to(self._device) for tensor in (values, scales, zeros))
        return Int4Weight.pack(values, scales, zeros, self._group_size, None if is_sorted else order.to(self._device))

    def _order(self, tensors: dict[str, Tensor]) -> Tensor:
        """The inputs by their groups."""
        inputs = torch.arange(self.shape[1])
        group = tensors.get("g_idx", tensors.get("weight_g_idx"))
        if group is None:
            return inputs
        order = group.argsort(stable=True)
        if not torch.equal(group[order].long(), inputs // self._group_size):
            raise ValueError(f"g_idx does not put {self._group_size} inputs into each group")
        return order

    @property
    def _layout(self) -> Int4Layout:
        return INT4_LAYOUTS[self._scheme.layout]

    @property
    def _group_size(self) -> int:
        return self._scheme.group_size or self.shape[1]

    def _blank(self, name: str, size: int) -> list[WeightSlot]:
        try:
            return self._layout.blank(self._scheme, size, self.shape[1])
        except ValueError as error:
            raise ModelError(f"{name}: {error}") from error


class StoredBytes(StoredModules[ByteScheme]):
    """A byte a weight: int8 or fp8, with scales for the whole, for outputs or for blocks."""

    def _read(self) -> ScaledWeight:
        tensors = [part for _, part in self._tensors()]
        values = torch.cat([part["weight"] for part in tensors])
        scales = torch.cat([self._rows(part) for part in tensors]).t().contiguous()
        group_size = self._scheme.block[1] if self._scheme.scales == "block" else self.shape[1]
        return ScaledWeight(values.to(self._device), scales.to(self._device), group_size)

    def _rows(self, part: dict[str, Tensor]) -> Tensor:
        """Every output's own scales: [out, num_groups]."""
        scales, num_outputs = part[self._scheme.scale_name], len(part["weight"])
        if self._scheme.scales == "block":
            return scales.repeat_interleave(self._scheme.block[0], dim=0)[:num_outputs]
        return scales.reshape(-1, 1).expand(num_outputs, 1)

    def _blank(self, name: str, size: int) -> list[WeightSlot]:
        num_inputs, (rows, columns) = self.shape[1], self._scheme.block
        shapes = {"tensor": (1,), "channel": (size, 1), "block": (-(-size // rows), -(-num_inputs // columns))}
        weight = torch.empty(size, num_inputs, dtype=_BYTE_DTYPES[self._scheme.kind])
        blocks = Axes(Axis(0, rows), Axis(1, columns))
        axes = {"tensor": WHOLE, "channel": OF_OUTPUTS, "block": blocks}[self._scheme.scales]
        # Random bytes of int8 are spread over all of its range; those of fp8 are random numbers.
        is_int8 = self._scheme.kind == "int8"
        scale = num_inputs**-0.5 / 73 if is_int8 else 1.0
        scales = torch.empty(shapes[self._scheme.scales])
        return [
            WeightSlot("weight", weight, axes=OF_MATRIX),
            WeightSlot(self._scheme.scale_name, scales, constant=scale, constant_shrinks=is_int8, axes=axes),
        ]


class StoredNvfp4(StoredModules[Nvfp4Scheme]):
    """Four bits a weight, floats, with a scale for each 16 inputs and a factor for a module."""

    def _read(self) -> Fp4Weight:
        packed, scales, factors = zip(*(self._of(part) for _, part in self._tensors()), strict=True)
        values = fp4_values(torch.cat(packed).to(self._device))
        return Fp4Weight.pack_nvfp4(values, torch.cat(scales).to(self._device), torch.cat(factors).to(self._device))

    def _of(self, part: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        packed, factor = part[self._scheme.weight_name], part[self._scheme.factor_name]
        return packed, part["weight_scale"], (1 / factor if self._scheme.divides else factor).expand(len(packed))

    def _blank(self, name: str, size: int) -> list[WeightSlot]:
        num_inputs, divides = self.shape[1], self._scheme.divides
        if num_inputs % NVFP4_GROUP:
            raise ModelError(f"{name}: in_features {num_inputs} is no multiple of {NVFP4_GROUP}, which have one scale")
        packed = torch.empty(size, num_inputs // 2, dtype=torch.uint8)
        scales = torch.empty(size, num_inputs // NVFP4_GROUP, dtype=torch.float8_e4m3fn)
        # Random bytes are random values; of their size scales would be too small.
        drawn = _RANDOM_FACTOR * num_inputs**-0.5 / RANDOM_FP4_SIZE
        of_groups, factor = Axes(Axis(0), Axis(1, NVFP4_GROUP)), _RANDOM_FACTOR if divides else 1 / _RANDOM_FACTOR
        return [
            WeightSlot(self._scheme.weight_name, packed, axes=Axes(Axis(0), Axis(1, 2))),
            WeightSlot("weight_scale", scales, constant=drawn, constant_shrinks=True, axes=of_groups),
            WeightSlot(self._scheme.factor_name, torch.empty(1), constant=factor, is_positive=divides),
        ]


@dataclass(frozen=True)
class StoredStackedBytes:
    """One of several matrices that are one tensor on disk. See `StoredWeight`; what is read of it goes to `device`.

    values: [out, in], a byte each; scale: [1, 1], of all of them.
    """

    values: Tensor
    scale: Tensor
    dtype: torch.dtype
    device: torch.device

    @property
    def shape(self) -> tuple[int, int]:
        num_outputs, num_inputs = self.values.shape
        return num_outputs, num_inputs

    def read(self) -> ScaledWeight:
        """See `StoredWeight`."""
        scales = self.scale.repeat(1, len(self.values))
        return ScaledWeight(self.values.to(self.device), scales.to(self.device), self.shape[1])


def blank_stacked_bytes(scheme: ByteScheme, *shape: int) -> tuple[Tensor, Tensor]:
    """All their values and scales, to be filled. shape: matrices, outputs and inputs."""
    return torch.empty(shape, dtype=_BYTE_DTYPES[scheme.kind]), torch.empty(shape[0], 1, 1)


class StoredBlocks(StoredModules[BlockScheme]):
    """GGUF's blocks of up to eight bits a weight."""

    def _read(self) -> ScaledWeight:
        parts = [BYTE_LAYOUTS[self._scheme.layout].read(part) for _, part in self._tensors()]
        values, scales = (torch.cat(each).to(self._device) for each in zip(*parts, strict=True))
        return ScaledWeight(values, scales.t().contiguous(), self._scheme.group_size)

    def _blank(self, name: str, size: int) -> list[WeightSlot]:
        return BYTE_LAYOUTS[self._scheme.layout].blank(size, self.shape[1])


def stored_modules(
    scheme: WeightScheme,
    names: Sequence[str],
    sizes: Sequence[int],
    num_inputs: int,
    dtype: torch.dtype,
    device: torch.device,
    orders: Sequence[Tensor | None] = (),
) -> StoredInt4 | StoredBytes | StoredBlocks | StoredNvfp4:
    """Modules of `sizes` outputs, quantised alike. Raises `ModelError` where the scheme has no room for these sizes."""
    if isinstance(scheme, Int4Scheme):
        return StoredInt4(scheme, names, sizes, num_inputs, dtype, device, orders)
    if isinstance(scheme, BlockScheme):
        return StoredBlocks(scheme, names, sizes, num_inputs, dtype, device, orders)
    if isinstance(scheme, Nvfp4Scheme):
        return StoredNvfp4(scheme, names, sizes, num_inputs, dtype, device, orders)
    assert isinstance(scheme, ByteScheme), "stacked experts are no modules"
    return StoredBytes(scheme, names, sizes, num_inputs, dtype, device, orders)


def _joined(orders: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """Of all modules side by side; None where none has another."""
    if all(order is None for order in orders):
        return None
    starts = accumulate(sizes, initial=0)
    parts = zip(starts, orders, sizes, strict=False)
    return torch.cat([start + (torch.arange(size) if order is None else order) for start, order, size in parts])


def _narrowed(scales: Tensor) -> Tensor:
    """In float16 where nothing is lost by it, as it is where most formats have them so."""
    half = scales.half()
    return half if torch.equal(half.float(), scales) else scales
