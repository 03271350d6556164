"""Launches that begin while the kernel before them still runs: programmatic dependent launch, which came with Hopper.

What a kernel of a decode step computes takes a few microseconds, of which its beginning and end are a part. So its
programs begin as soon as there is room for them, and wait, before they touch any memory, until the kernels before it
are done: `wait_for_inputs`.
"""

import os
from dataclasses import fields
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from .device import is_hopper
from .triton_assembler import cuda_of_driver

# The first whose graphs know of such launches.
_FIRST_CUDA = (12, 3)


@cache
def early_launch(device: torch.device) -> dict[str, bool]:
    """What a kernel that calls `wait_for_inputs(IS_EARLY)` is launched with, beside its own arguments.

    A kernel that does not call it must not be launched so: it would read what is not written yet.
    """
    # Without a GPU kernels are compiled, and nobody launches them.
    driver_can = device.type != "cuda" or cuda_of_driver() >= _FIRST_CUDA
    # Where it was seen to pay.
    is_early = is_hopper(device) and driver_can and _triton_can()
    return {"IS_EARLY": True, "launch_pdl": True} if is_early else {"IS_EARLY": False}


def _triton_can() -> bool:
    if os.environ.get("TRITON_INTERPRET") == "1":
        # Its interpreter has every kernel wait for the one before it.
        return False
    try:
        from triton.backends.nvidia.compiler import CUDAOptions
    except ImportError:
        return False
    cuda: Any = tl.extra.cuda
    return hasattr(cuda, "gdc_wait") and "launch_pdl" in {field.name for field in fields(CUDAOptions)}


@triton.jit
def wait_for_inputs(IS_EARLY: tl.constexpr):
    """Wait until all kernels before this one are done and what they wrote is seen, and let the next one begin.

    To be called by every program before it reads or writes anything, as the first thing that it does: the next kernel
    waits for this one alone, and relies on it that this one has waited for all the others.
    """
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def let_next_begin(IS_EARLY: tl.constexpr):
    """In place of `wait_for_inputs`, where the kernel before this one, which has waited, writes nothing that this one
    touches: all kernels before that one are done. Such a kernel waits as the last thing that it does, `wait_at_end`.
    """
    if IS_EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_at_end(IS_EARLY: tl.constexpr):
    """See `let_next_begin`: the next kernel waits for this one alone."""
    if IS_EARLY:
        tl.extra.cuda.gdc_wait()
