"""The C++ kernels for a CPU, where a compiler was at hand at installation and the processor has what they need.

They take raw pointers through `ctypes`: nothing is linked to torch, so one build serves every torch version. Their
threads are torch's own: the OpenMP runtime is not linked either, but found in the process, where torch has put it.
"""

import ctypes
import logging
import os
from enum import IntEnum
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import torch
from torch import Tensor

from .signatures import declare

logger = logging.getLogger(__name__)

# Set to 0, everything runs on torch's own operations: to compare, or to rule these kernels out.
_SWITCH = "HEADRACE_NATIVE_KERNELS"


class InstructionSet(IntEnum):
    """What the processor offers, each level including those before it."""

    NONE = 0
    AVX2 = 1
    AVX512 = 2
    AVX512_BF16 = 3
    AMX = 4


@cache
def native_library() -> ctypes.CDLL | None:
    """The compiled kernels; None where they were not built, are switched off or cannot run on this processor."""
    if os.environ.get(_SWITCH) == "0" or not _has_openmp():
        return None
    file = _library_file()
    library = _open(file) if file else None
    if library is None or InstructionSet(library.headrace_instruction_set()) is InstructionSet.NONE:
        return None
    try:
        declare(library)
    except AttributeError as error:
        logger.warning("the compiled kernels are of another version (%s): install headrace again to use them", error)
        return None
    return library


def require_native_library() -> ctypes.CDLL:
    """The compiled kernels, where the caller knows that there are some."""
    library = native_library()
    assert library is not None, "the compiled kernels are called where there are none"
    return library


@cache
def instruction_set() -> InstructionSet:
    """What the compiled kernels use on this processor."""
    library = native_library()
    return InstructionSet(library.headrace_instruction_set()) if library else InstructionSet.NONE


def has_avx512() -> bool:
    """Whether the compiled kernels for AVX-512 run on this processor: of those in bfloat16 `has_bfloat16` tells."""
    return instruction_set() >= InstructionSet.AVX512


def has_bfloat16() -> bool:
    """Whether the compiled kernels for bfloat16 run on this processor."""
    return instruction_set() >= InstructionSet.AVX512_BF16


def runs_native(first: Tensor, *others: Tensor) -> bool:
    """Whether the compiled kernels can take these tensors: on the CPU, the last dimension dense, all of one dtype.

    In bfloat16 they need AVX-512 with instructions for it, in float32 AVX2.
    """
    dtype = first.dtype
    if not (has_bfloat16() if dtype == torch.bfloat16 else dtype == torch.float32 and native_library() is not None):
        return False
    # A plain loop, and not `device.type`: every layer asks several times a step.
    for tensor in (first, *others):
        if not tensor.is_cpu or tensor.dtype != dtype or tensor.stride(-1) != 1:
            return False
    return True


@cache
def native_kernel(name: str, dtype: torch.dtype) -> "ctypes._NamedFuncPointer":
    """The compiled kernel of that name for tensors that `runs_native` has passed."""
    prefix = "headrace_float32_" if dtype == torch.float32 else "headrace_"
    kernel: ctypes._NamedFuncPointer = getattr(require_native_library(), prefix + name)
    return kernel


def are_dense(*tensors: Tensor) -> bool:
    """Whether each of these lies in memory without gaps."""
    return all(map(Tensor.is_contiguous, tensors))


def _has_openmp() -> bool:
    """Whether torch brought an OpenMP runtime that the kernels' threads can come from."""
    return hasattr(ctypes.CDLL(None), "GOMP_parallel")


def _library_file() -> Path | None:
    files = (Path(__file__).with_name(f"_native{suffix}") for suffix in EXTENSION_SUFFIXES)
    return next((file for file in files if file.is_file()), None)


def _open(file: Path) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(str(file))
    except OSError:
        return None


__all__ = [
    "InstructionSet",
    "are_dense",
    "has_avx512",
    "has_bfloat16",
    "instruction_set",
    "native_kernel",
    "native_library",
    "require_native_library",
    "runs_native",
]
