"""A plan in device memory that goes on with sequences that decode."""

from functools import cached_property

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..upload import upload
from .batch_layout import Ints
from .decode_step import DecodeStep
from .device_plan import DevicePlan
from .plan import AttentionPlan

# What goes along with a plan into its memory.
Places = NDArray[numpy.int64]


class FollowedPlan:
    """A plan's image on the host, of which each step changes little and copies no more."""

    def __init__(self, plan: AttentionPlan, held: DevicePlan, places: Places) -> None:
        """Puts the plan and the places into `held`, into which nobody else is to load while this is in use.

        Raises `PlanTooLargeError`.
        """
        self._plan, self._held, self._image = plan, held, held.image(plan)
        self._sections = held.capacity.sections
        self._places: Places = self._image[self._sections["places"]].view(numpy.int64)
        self._places[: len(places)] = places
        upload(torch.from_numpy(self._image), held.span(0, len(self._image)))

    def advance(self, step: DecodeStep, places: Places) -> None:
        """Go on to the step after the one that it stands at, in one copy that the host does not wait for."""
        self._places[: len(places)] = places
        self._items += self._growth
        if len(step.rows):
            self._blocks[self._plan.tables[step.rows] + step.columns] = step.blocks
            upload(*self._places_to_blocks)
        else:
            upload(*self._places_to_items)

    @cached_property
    def _items(self) -> Ints:
        start = self._sections["narrow"].start
        return self._image[start : start + self._plan.narrow.size]

    @cached_property
    def _growth(self) -> Ints:
        return self._plan.growth.ravel()

    @cached_property
    def _blocks(self) -> Ints:
        return self._image[self._sections["blocks"]]

    @cached_property
    def _places_to_items(self) -> tuple[Tensor, Tensor]:
        return self._from_and_to(self._sections["narrow"].start + self._plan.narrow.size)

    @cached_property
    def _places_to_blocks(self) -> tuple[Tensor, Tensor]:
        return self._from_and_to(len(self._image))

    def _from_and_to(self, end: int) -> tuple[Tensor, Tensor]:
        """Where to copy from and to, asked for once: slices take torch longer than the copy."""
        begin = self._sections["places"].start
        return torch.from_numpy(self._image[begin:end]), self._held.span(begin, end)
