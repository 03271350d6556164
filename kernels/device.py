"""Whether an operation runs as a Triton kernel, and what such a kernel has to know of its device."""

import os
import warnings
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

# The kernels use bfloat16 products, which came with Ampere.
MIN_CAPABILITY = (8, 0)
_HOPPER = 9
_DATA_CENTRE_BLACKWELL = 10
# Ada and Hopper were the first whose tensor cores multiply 8-bit floats.
_FP8_CAPABILITY = (8, 9)
# What the interpreter pretends to have: enough that work is shared out, and a Hopper's shared memory.
_INTERPRETED_PROCESSORS = 2
_INTERPRETED_SHARED_BYTES = 227 * 1024
_INTERPRETED_CAPABILITY = (0, 0)
# What a processor keeps for each program of the shared memory that it has.
RESERVED_SHARED_BYTES = 1024


class UnsupportedGpuError(RuntimeError):
    """The GPU or its driver is older than the kernels need."""


def runs_triton(tensor: Tensor) -> bool:
    """Whether operations on `tensor` are Triton's: it is on a CUDA GPU and Triton is installed.

    Raises `UnsupportedGpuError` when the GPU is too old for the kernels, or its driver is.
    """
    return tensor.is_cuda and _has_triton() and _is_new_enough(tensor.device) and _is_assembled_rightly(tensor.device)


def supports_fp8(device: torch.device) -> bool:
    """Whether a GPU multiplies 8-bit floats itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FP8_CAPABILITY


@cache
def _has_triton() -> bool:
    if find_spec("triton") is not None:
        return True
    warnings.warn(
        "Triton is not installed: on the GPU everything runs as plain torch, correctly but slowly. "
        "`pip install triton` (or headrace[gpu]) mends that.",
        RuntimeWarning,
        stacklevel=3,
    )
    return False


@cache
def _is_new_enough(device: torch.device) -> bool:
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        needed, found = (".".join(map(str, version)) for version in (MIN_CAPABILITY, capability))
        name = torch.cuda.get_device_name(device)
        raise UnsupportedGpuError(f"{name} has compute capability {found}; the kernels need {needed} (Ampere) or newer")
    return True


@cache
def _is_assembled_rightly(device: torch.device) -> bool:
    # Imports Triton, which whoever has no GPU need not have.
    from .triton_assembler import why_hopper_is_assembled_wrongly

    is_hopper = torch.cuda.get_device_capability(device)[0] == _HOPPER
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if is_hopper and not is_interpreted and (problem := why_hopper_is_assembled_wrongly()):
        raise UnsupportedGpuError(problem)
    return True


def is_hopper(device: torch.device) -> bool:
    """Whether a GPU is of the one generation that has its instructions and was measured."""
    return _generation(device) == _HOPPER


def multiplies_asynchronously(device: torch.device) -> bool:
    """Whether warps go on while a GPU's tensor cores multiply what they were told to: a Hopper's and a B200's do."""
    return _generation(device) in (_HOPPER, _DATA_CENTRE_BLACKWELL)


def _generation(device: torch.device) -> int:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else _INTERPRETED_CAPABILITY
    return capability[0]


@cache
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU."""
    if device.type != "cuda":
        return _INTERPRETED_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def shared_bytes(device: torch.device) -> int:
    """The most shared memory that a program may have on a GPU: 99 KiB on Ada, 163 on an A100, 227 on Hopper."""
    if device.type != "cuda":
        return _INTERPRETED_SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)
    # torch's own types do not know it.
    return int(properties.shared_memory_per_block_optin)
