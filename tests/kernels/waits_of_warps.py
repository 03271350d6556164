"""A kernel whose warps do different things, as Triton compiles it: what the emulated GPU makes of its waits.

`test_on_emulated_gpu.py` has these tests run: where Triton's interpreter has run, what it patched stays, and nothing is
compiled.
"""

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", minversion="3.7", reason="compiles kernels as 3.7 does")

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from .ptx.compiling import compiled, signature_of
from .ptx.conflicts import ConflictError
from .ptx.launch import DeadlockError, launch

TILE, STAGES = gl.constexpr(128), gl.constexpr(2)


@gluon.jit
def _copy(numbers, num_tiles, tiles, ready, free, waits: gl.constexpr):
    nth = gl.arange(0, TILE, layout=gl.BlockedLayout([4], [32], [1], [0]))
    for tile in range(num_tiles):
        stage, phase = tile % STAGES, tile // STAGES & 1
        if waits:
            mbarrier.wait(free.index(stage), phase ^ 1)
        async_copy.async_copy_global_to_shared(tiles.index(stage), numbers + tile * TILE + nth)
        async_copy.mbarrier_arrive(ready.index(stage), increment_count=False)
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def _add(sums, num_tiles, tiles, ready, free, waits: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    total = gl.zeros([TILE], gl.int32, layout)
    for tile in range(num_tiles):
        stage, phase = tile % STAGES, tile // STAGES & 1
        if waits:
            mbarrier.wait(ready.index(stage), phase)
        total += tiles.index(stage).load(layout)
        mbarrier.arrive(free.index(stage))
    gl.store(sums + gl.arange(0, TILE, layout=layout), total)


@gluon.jit
def add_tiles_kernel(sums, numbers, num_tiles, waits_for_free: gl.constexpr, waits_for_ready: gl.constexpr):
    tiles = gl.allocate_shared_memory(gl.int32, [STAGES, TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=32)
        mbarrier.init(free.index(stage), count=1)
    gl.warp_specialize(
        [
            (_add, (sums, num_tiles, tiles, ready, free, waits_for_ready)),
            (_copy, (numbers, num_tiles, tiles, ready, free, waits_for_free)),
        ],
        [1],
        [24],
    )


def add_tiles(numbers: torch.Tensor, waits_for_free: bool = True, waits_for_ready: bool = True) -> torch.Tensor:
    sums = torch.zeros(numbers.shape[1], dtype=torch.int32)
    tensors = {"sums": sums, "numbers": numbers}
    waits = {"waits_for_free": waits_for_free, "waits_for_ready": waits_for_ready}
    arguments: dict[str, Any] = tensors | {"num_tiles": len(numbers)} | waits
    signature = signature_of(add_tiles_kernel, arguments)
    program, shared_bytes = compiled(add_tiles_kernel, signature, 90, {"num_warps": 4})
    launch(program, [*signature.values, np.uint64(0), np.uint64(0)], (1, 1, 1), shared_bytes, tensors)
    return sums


NUMBERS = torch.arange(5 * 128, dtype=torch.int32).view(5, 128)


def test_tiles_go_from_warp_to_warps():
    assert torch.equal(add_tiles(NUMBERS), NUMBERS.sum(0, dtype=torch.int32))


@pytest.mark.parametrize("waits", [(False, True), (True, False)], ids=["for free", "for ready"])
def test_a_wait_that_is_left_out_is_seen(waits):
    """Or phases pass by that somebody waits for."""
    with pytest.raises((ConflictError, DeadlockError), match=r"with nothing between|wait in vain for mbarrier"):
        add_tiles(NUMBERS, *waits)
