"""A CUDA device without a GPU: the host's memory and processor behind torch's own interface.

It does nothing before it is waited for, in an order as unlucky as streams and events allow; memory that nobody has
written holds NaN; what a capture refuses is refused. So whatever happens to be right on an idle GPU fails here.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.engine.execution import batch
from headrace.kernels import device as kernels_device

from .graphs import Graph
from .memory import Memory
from .streams import Event, Stream, StreamContext, Timeline
from .tensors import Dispatch
from .triton_launches import launch_into

_CPU_GENERATOR, _CPU_TENSOR = torch.Generator, torch.tensor


def _new_tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
    """As `torch.tensor`, which makes it on the host and copies it."""
    made = _CPU_TENSOR(data, **options)
    return made if device is None else made.to(device)


class _Generator:
    """The host's, wherever it is to be."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _CPU_GENERATOR()


@dataclass(frozen=True)
class SimulatedGpu:
    timeline: Timeline
    memory: Memory


@contextmanager
def simulated_gpu(
    monkeypatch: pytest.MonkeyPatch,
    is_hasty: bool = False,
    total_bytes: int = 2**30,
    others: int = 0,
    capability: tuple[int, int] = (9, 0),
) -> Iterator[SimulatedGpu]:
    """While this lasts there is a GPU of so much memory; see `Timeline` and `Memory`."""
    timeline = Timeline(is_hasty)
    memory = Memory(timeline, total_bytes, others)
    _forget()
    with monkeypatch.context() as patch, _device_guard():
        for name, value in _cuda(timeline, memory, capability).items():
            patch.setattr(torch.cuda, name, value)
        for name, value in _private(memory).items():
            patch.setattr(torch._C, name, value, raising=False)
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(torch, "Generator", _Generator)
        patch.setattr(torch, "tensor", _new_tensor)
        launch_into(timeline, patch)
        try:
            with Dispatch(timeline, memory):
                yield SimulatedGpu(timeline, memory)
        finally:
            _forget()


def _cuda(timeline: Timeline, memory: Memory, capability: tuple[int, int]) -> dict[str, Any]:
    """What the engine asks of `torch.cuda`, by its names."""
    properties = SimpleNamespace(
        name="Simulated",
        multi_processor_count=2,
        shared_memory_per_block_optin=232_448,
        total_memory=memory.total,
        major=capability[0],
        minor=capability[1],
    )
    return {
        "is_available": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: capability,
        "get_arch_list": lambda: ["sm_80", "sm_90"],
        "get_device_name": lambda device=None: properties.name,
        "get_device_properties": lambda device=None: properties,
        "Stream": lambda device=None, priority=0: Stream(timeline),
        "Event": partial(Event, timeline),
        "stream": partial(StreamContext, timeline),
        "current_stream": lambda device=None: timeline.current,
        "default_stream": lambda device=None: timeline.default,
        "synchronize": lambda device=None: timeline.wait_for_all(),
        "CUDAGraph": lambda keep_graph=False: Graph(timeline, memory),
        "graph_pool_handle": memory.new_pool,
        "is_current_stream_capturing": lambda: timeline.is_capturing,
        "memory_allocated": lambda device=None: memory.used,
        "memory_reserved": lambda device=None: memory.reserved,
        "max_memory_reserved": lambda device=None: memory.max_reserved,
        "reset_peak_memory_stats": lambda device=None: memory.reset_peak(),
        "mem_get_info": lambda device=None: (memory.total - memory.others - memory.reserved, memory.total),
        "empty_cache": memory.empty_cache,
    }


def _private(memory: Memory) -> dict[str, Any]:
    return {
        "_host_emptyCache": lambda: None,
        "_cuda_endAllocateToPool": memory.end_allocate_to_pool,
        "_cuda_releasePool": memory.release_pool,
    }


@contextmanager
def _device_guard() -> Iterator[None]:
    """Let torch believe that it can choose among CUDA devices: a build for CPUs knows none, but one for `meta`."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 15).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, meta = 1, 14
    before, guards[cuda] = guards[cuda], guards[meta]
    try:
        yield
    finally:
        guards[cuda] = before


def _forget() -> None:
    """What was found out about another device, or made there."""
    for module in (kernels_device, batch):
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
