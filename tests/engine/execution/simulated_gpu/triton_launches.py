"""Triton's kernels, interpreted when their stream comes to them; they may touch their tensors' memory and no other."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime import interpreter

from .streams import Timeline
from .tensors import DeviceTensor


def launch_into(timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queue every launch on tensors of the device."""
    run = interpreter.InterpretedFunction.run

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(isinstance(tensor, DeviceTensor) for tensor in tensors):
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        if not all(isinstance(tensor, DeviceTensor) for tensor in tensors):
            raise ValueError(f"{self.__name__}: Pointer argument cannot be accessed from Triton (cpu tensor?)")
        hosts: list[Any] = [tensor.host for tensor in tensors if isinstance(tensor, DeviceTensor)]
        held_args, held_kwargs = tree_map(_host, args), tree_map(_host, kwargs)

        def work() -> None:
            with Touching(hosts):
                run(self, *held_args, grid=grid, warmup=False, **held_kwargs)

        timeline.launch(work)
        return None

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", launch)
    _check_accesses(monkeypatch)


def keep_within_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold kernels that are interpreted on the host to the memory of the tensors that they are given."""
    run = interpreter.InterpretedFunction.run

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        with Touching([leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]):
            run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", launch)
    _check_accesses(monkeypatch)


def _check_accesses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("create_masked_load", "create_masked_store"):
        monkeypatch.setattr(
            interpreter.InterpreterBuilder, name, _checked(getattr(interpreter.InterpreterBuilder, name))
        )


class Touching:
    """While this lasts kernels may read and write these tensors' memory."""

    ranges: tuple[Any, Any] | None = None

    def __init__(self, tensors: list[Tensor]) -> None:
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        starts = numpy.array(sorted(storages), dtype=numpy.uint64)
        self._ranges = starts, starts + numpy.array([storages[start] for start in starts.tolist()], dtype=numpy.uint64)

    def __enter__(self) -> None:
        Touching.ranges = self._ranges

    def __exit__(self, *_: object) -> None:
        Touching.ranges = None


def _checked(access: Callable[..., Any]) -> Callable[..., Any]:
    """A load or store that raises where a GPU would say `illegal memory access`, if one is lucky."""

    def checked(self: Any, pointers: Any, *rest: Any) -> Any:
        # A load's mask comes first, a store's after the value.
        mask = rest[0] if access.__name__.endswith("load") else rest[1]
        if Touching.ranges is not None:
            starts, ends = Touching.ranges
            touched = pointers.data[numpy.broadcast_to(mask.data, pointers.data.shape).astype(bool)]
            place = numpy.searchsorted(starts, touched, side="right") - 1
            if touched.size and ((place < 0) | (touched >= ends[place])).any():
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return access(self, pointers, *rest)

    return checked


def _host(value: Any) -> Any:
    return value.host if isinstance(value, DeviceTensor) else value
