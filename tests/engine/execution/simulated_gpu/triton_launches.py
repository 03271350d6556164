"""Triton's kernels, interpreted when their stream comes to them, their programs in no order to be relied on.

They may touch their tensors' memory and no other, and no program may touch what another one writes.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy
import pytest
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime import interpreter

from ....kernels.ptx.conflicts import ConflictError
from ....kernels.ptx.memory import GlobalMemory
from ....kernels.ptx.order import Order
from .streams import Timeline
from .tensors import DeviceTensor

_ACQUIRING = (interpreter._ir.MEM_SEMANTIC.ACQUIRE, interpreter._ir.MEM_SEMANTIC.ACQUIRE_RELEASE)
_RELEASING = (interpreter._ir.MEM_SEMANTIC.RELEASE, interpreter._ir.MEM_SEMANTIC.ACQUIRE_RELEASE)


def launch_into(timeline: Timeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queue every launch on tensors of the device."""
    run = interpreter.InterpretedFunction.run

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not any(isinstance(tensor, DeviceTensor) for tensor in tensors):
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        if not all(isinstance(tensor, DeviceTensor) for tensor in tensors):
            raise ValueError(f"{self.__name__}: Pointer argument cannot be accessed from Triton (cpu tensor?)")
        held_args, held_kwargs = tree_map(_host, args), tree_map(_host, kwargs)

        def work() -> None:
            with Touching(_named_tensors(self, held_args, held_kwargs)):
                run(self, *held_args, grid=grid, warmup=False, **held_kwargs)

        timeline.launch(work)
        return None

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", launch)
    _check_accesses(monkeypatch)


def check_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold kernels that are interpreted on the host to the memory of the tensors that they are given, and their
    programs to what no other one writes."""
    run = interpreter.InterpretedFunction.run

    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        with Touching(_named_tensors(self, args, kwargs)):
            run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", launch)
    _check_accesses(monkeypatch)


def _named_tensors(kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
    given = dict(zip(kernel.arg_names, args, strict=False)) | dict(kwargs)
    return {name: value for name, value in given.items() if isinstance(value, Tensor)}


def _check_accesses(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = interpreter.InterpreterBuilder
    wrappers = {
        "set_grid_dim": _beginning,
        "set_grid_idx": _shuffling,
        "create_masked_load": _loading,
        "create_masked_store": _storing,
        "create_atomic_rmw": _updating,
        "create_atomic_cas": _updating,
    }
    for name, wrap in wrappers.items():
        monkeypatch.setattr(builder, name, wrap(getattr(builder, name)))


class Touching:
    """While this lasts kernels may read and write these tensors' memory, and are told of by `current`."""

    current: "Touching | None" = None

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self._programs: list[int] = []

    def __enter__(self) -> None:
        Touching.current = self

    def __exit__(self, *_: object) -> None:
        Touching.current = None

    def begin(self, num_programs: int) -> None:
        self._order = Order(num_programs)
        self._memory = GlobalMemory(self._tensors, self._order)
        self._programs = list(range(num_programs))
        random.Random(num_programs).shuffle(self._programs)

    def next(self) -> int:
        """The program that is to run."""
        self._program = self._programs.pop()
        return self._program

    def read(self, pointers: Any, mask: Any) -> None:
        self._memory.note_read(_touched(pointers, mask), _width(pointers), self._agent())

    def write(self, pointers: Any, mask: Any) -> None:
        self._memory.note_write(_touched(pointers, mask), _width(pointers), self._agent())

    def update(self, pointers: Any, mask: Any, semantic: Any) -> None:
        addresses = _touched(pointers, mask)
        self._memory.note_update(addresses, _width(pointers), self._agent())
        for address in addresses.tolist():
            self._order.update(self._program, address, semantic in _ACQUIRING, semantic in _RELEASING)

    def _agent(self) -> Any:
        return self._order.agents(self._program)


def _touched(pointers: Any, mask: Any) -> Any:
    addresses = pointers.data.view(numpy.int64)
    if mask is None or mask.data.all():
        return addresses.ravel()
    return addresses[numpy.broadcast_to(mask.data, addresses.shape).astype(bool)]


def _width(pointers: Any) -> int:
    return max(1, pointers.get_element_ty().primitive_bitwidth // 8)


def _beginning(set_grid_dim: Callable[..., Any]) -> Callable[..., Any]:
    def begin(self: Any, *sizes: int) -> None:
        set_grid_dim(self, *sizes)
        if Touching.current is not None:
            Touching.current.begin(int(numpy.prod(sizes)))

    return begin


def _shuffling(set_grid_idx: Callable[..., Any]) -> Callable[..., Any]:
    def set_another(self: Any, *place: int) -> None:
        if Touching.current is not None:
            place = tuple(map(int, numpy.unravel_index(Touching.current.next(), self.grid_dim)))
        set_grid_idx(self, *place)

    return set_another


def _loading(access: Callable[..., Any]) -> Callable[..., Any]:
    def load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        if Touching.current is not None:
            Touching.current.read(pointers, mask)
        return access(self, pointers, mask, *rest)

    return load


def _storing(access: Callable[..., Any]) -> Callable[..., Any]:
    def store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        if Touching.current is not None:
            Touching.current.write(pointers, mask)
        access(self, pointers, value, mask, *rest)
        if Touching.current is not None:
            stored = interpreter._interpreter.load(pointers.data, mask.data, value.data, value.data.dtype)
            if stored.tobytes() != value.data.tobytes():
                raise ConflictError("a program writes different numbers in one place")

    return store


def _updating(access: Callable[..., Any]) -> Callable[..., Any]:
    """An exchange has its pointers first, other atomics what they do; both have what they order, and where, last."""

    def update(self: Any, *given: Any) -> Any:
        if Touching.current is not None:
            *operands, semantic, _ = given
            pointers, mask = (operands[0], None) if access.__name__.endswith("cas") else (operands[1], operands[3])
            Touching.current.update(pointers, mask, semantic)
        return access(self, *given)

    return update


def _host(value: Any) -> Any:
    return value.host if isinstance(value, DeviceTensor) else value
