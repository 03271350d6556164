"""Where a checkpoint's tensor is in a GGUF file, and what llama.cpp's converter did to it. Free of torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .file import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

Places = NDArray[np.int64]


@dataclass(frozen=True)
class Source:
    """What of a GGUF tensor is a checkpoint's tensor, and what was done to it.

    `expert`: the first index, where one tensor has all experts. `rows`: where the tensor has each of the checkpoint's
    outputs. `groups`: the same of groups of inputs, of one size. `restored`: gives a checkpoint's numbers for the
    file's.
    """

    info: TensorInfo
    expert: int | None = None
    rows: Places | None = None
    groups: Places | None = None
    restored: "Callable[[Tensor], Tensor] | None" = None

    @property
    def is_consistent(self) -> bool:
        """Whether the tensor is as large as the metadata say, by which it is put in order."""
        shape = self.info.shape
        num_outputs = shape[-2] if len(shape) > 1 else shape[0]
        has_rows = self.rows is None or int(self.rows.max(initial=0)) < num_outputs
        return has_rows and (self.groups is None or shape[-1] % len(self.groups) == 0)

    @property
    def has_whole_groups(self) -> bool:
        """Whether each block is within one group of inputs."""
        return self.groups is None or self.info.shape[-1] // len(self.groups) % self.info.type.num_weights == 0


def in_halves(num_outputs: int, num_heads: int) -> Places:
    """Where heads have their outputs, neighbours of which are rotated there and halves here."""
    return np.arange(num_outputs).reshape(num_heads, -1, 2).swapaxes(1, 2).ravel()


def spread(places: Places, size: int) -> Places:
    """The places of what each of `places` has so many of."""
    found: Any = places[:, np.newaxis] * size + np.arange(size)
    return np.asarray(found.ravel())
