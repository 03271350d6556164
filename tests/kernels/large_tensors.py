"""Tensors as large as they are on a GPU, and kernels over a part of them. Memory that nobody touches costs nothing."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from .ptx.conflicts import untouched

DTYPE = torch.float16


def huge(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """Zeros, of which no more is taken from the machine than is touched."""
    return torch.frombuffer(untouched(prod(shape) * dtype.itemsize), dtype=dtype).view(shape)


def apart(rows: Tensor) -> Tensor:
    """The same numbers, three rows or more, so far from each other that the last begins beyond 2**31."""
    assert len(rows) > 2
    stride = 2**31 // (len(rows) - 1) + 64
    memory = huge((len(rows) - 1) * stride + rows[0].numel(), dtype=rows.dtype)
    return memory.as_strided(rows.shape, (stride, *rows.contiguous().stride()[1:])).copy_(rows)


def at_the_end(last: Tensor, count: int) -> Tensor:
    """As many as `count`, of which the last is this one."""
    result = huge(count, *last.shape, dtype=last.dtype)
    result[-1] = last
    return result


def refuse_overflows(monkeypatch: pytest.MonkeyPatch, does_refuse: bool = True) -> None:
    """Of sums and products of 32 bits."""
    builder = interpreter.interpreter_builder
    options = replace(builder.options, debug=does_refuse, sanitize_overflow=does_refuse)
    monkeypatch.setattr(builder, "options", options)


def run_last_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a grid no other is run, and it is the last of as many as there would be: but of a mixture's pairs, all."""
    builder, run = interpreter.InterpreterBuilder, interpreter.InterpretedFunction.run
    set_dim, set_idx = builder.set_grid_dim, builder.set_grid_idx
    sizes: list[int] = []

    def run_last(self: Any, *args: Any, grid: Sequence[int], **kwargs: Any) -> None:
        sizes[:] = [] if self.__name__ == "sort_pairs_kernel" else (*grid, 1, 1)[:3]
        run(self, *args, grid=(1, 1, 1) if sizes else grid, **kwargs)

    def pretend_dim(self: Any, *given: int) -> None:
        set_dim(self, *given)
        self.grid_dim = tuple(sizes or given)

    def pretend_idx(self: Any, *given: int) -> None:
        set_idx(self, *given)
        if sizes:
            self.grid_idx = tuple(size - 1 for size in sizes)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", run_last)
    monkeypatch.setattr(builder, "set_grid_dim", pretend_dim)
    monkeypatch.setattr(builder, "set_grid_idx", pretend_idx)
