"""Numbers between host and device, without the host waiting for the steps that the device still computes."""

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor


def to_device(values: ArrayLike, device: torch.device, dtype: type = numpy.int64) -> Tensor:
    """`values` as a tensor there. A CPU's shares the memory of an array that has the dtype already."""
    array: NDArray[Any] = numpy.asarray(values, dtype=dtype)
    tensor = torch.from_numpy(array)
    if device.type != "cuda" or not array.size:
        return tensor.to(device)
    # From pageable memory torch would wait for the copy, and so for the steps before it. The allocator of pinned
    # memory knows of the copy, and does not reuse this before it is done.
    return tensor.pin_memory().to(device, non_blocking=True)


def all_to_device(parts: Sequence[ArrayLike], device: torch.device) -> Sequence[Tensor]:
    """Several lists of whole numbers, [n] int64 each there, with one copy."""
    arrays = [numpy.asarray(part, dtype=numpy.int64) for part in parts]
    return torch.split(to_device(numpy.concatenate(arrays), device), [len(array) for array in arrays])


class Readback:
    """Tensors on their way to the host."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.cuda.Event | None = None
        if not tensors or not tensors[0].is_cuda:
            self._copies = list(tensors)
            return
        self._copies = [torch.empty(each.shape, dtype=each.dtype, pin_memory=True) for each in tensors]
        for copy, tensor in zip(self._copies, tensors, strict=True):
            copy.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> list[NDArray[Any]]:
        """The tensors' values, once they are there; the host sleeps or spins until then."""
        if self._event is not None:
            self._event.synchronize()
        return [copy.numpy() for copy in self._copies]
