"""The adapters that a model holds on a GPU: each has a slot in memory that stays, so that CUDA graphs find it there."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy
import torch
from numpy.typing import NDArray

from ...kernels.linear import Linear, SlottedRows
from ...kernels.lora import AdapterMatrices, TokenTiles
from ..models.blocks import LinearPart
from .adapter import Adapter, by_matrix

Ints = NDArray[numpy.int64]


class AdapterSlots:
    """`max_loras` slots for adapters of up to `max_lora_rank`, in each of the projections that can be adapted."""

    def __init__(
        self,
        parts: Mapping[str, LinearPart],
        max_loras: int,
        max_lora_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._device, self._num_slots = device, max_loras
        self._rows = SlottedRows()
        self._parts = parts
        self._matrices: dict[Linear, AdapterMatrices] = {}
        # Where among its matrix's parts each projection is.
        self._place: dict[str, int] = {}
        # By the adapters' numbers.
        self._slots: dict[int, int] = {}
        for linear, within in by_matrix(parts).items():
            self._place.update((name, place) for place, name in enumerate(within))
            sizes = [(parts[name].start, parts[name].size) for name in within]
            matrices = AdapterMatrices.blank(
                max_loras, max_lora_rank, linear.num_inputs, linear.num_outputs, sizes, dtype, device
            )
            self._matrices[linear] = matrices
            linear.adapt_in_slots(self._rows, matrices)

    def install(self, held: Sequence[Adapter]) -> None:
        """Let those in that have no slot yet, in the place of those that are not held any more."""
        numbers = {adapter.number for adapter in held}
        for number in self._slots.keys() - numbers:
            del self._slots[number]
        for adapter in held:
            if adapter.number not in self._slots:
                self._put(adapter)

    def blank(self, num_tokens: int) -> TokenTiles:
        """For steps of up to so many tokens, to be filled by `load`."""
        return TokenTiles.blank(num_tokens, self._num_slots, self._device)

    def load(self, tiles: TokenTiles, numbers: Ints) -> None:
        """Put in a step's adapters, without waiting for the device. numbers: see `Batch.adapters`."""
        tiles.load(self._slots_of(numbers))

    def tiles_of(self, numbers: Ints) -> TokenTiles:
        """For one step of just so many tokens."""
        return TokenTiles.of(self._slots_of(numbers), self._num_slots, self._device)

    @contextmanager
    def applied(self, tiles: TokenTiles) -> Iterator[None]:
        """Add to a step's products what the adapters of `tiles` do."""
        with self._rows.having(tiles):
            yield

    def _put(self, adapter: Adapter) -> None:
        taken = set(self._slots.values())
        slot = next(slot for slot in range(self._num_slots) if slot not in taken)
        # Of another, or of one for whose other half there was no memory.
        for matrices in self._matrices.values():
            matrices.clear(slot)
        for name, addition in adapter.additions.items():
            part = self._parts[name]
            self._matrices[part.linear].put(slot, self._place[name], part.start, addition.down, addition.up)
        self._slots[adapter.number] = slot

    def _slots_of(self, numbers: Ints) -> Ints:
        slots = numpy.full_like(numbers, -1)
        for number in numpy.unique(numbers).tolist():
            if number:
                slots[numbers == number] = self._slots[number]
        return slots
