"""What every Triton wrapper asks of its arguments before it launches anything."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from .triton_assembler import cuda_of_driver, use_newer_assembler

# Before any kernel is compiled: every wrapper asks here.
use_newer_assembler(cuda_of_driver())

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    *,
    is_contiguous: bool = True,
) -> None:
    """Raise `ValueError` naming the argument unless it is as it should be.

    shape: None where any size is right. A tensor that need not be contiguous must be so in its last dimension.
    """
    said = f"{name} {tuple(tensor.shape)}"
    if tensor.ndim != len(shape) or any(
        want is not None and have != want for have, want in zip(tensor.shape, shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{said} must have the shape [{wanted}]")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{said} is {_name(tensor.dtype)}, and must be {' or '.join(map(_name, dtypes))}")
    if tensor.device != device:
        raise ValueError(f"{said} is on {tensor.device}, and must be on {device}")
    if is_contiguous and not tensor.is_contiguous():
        raise ValueError(f"{said} must be contiguous, and has strides {tensor.stride()}")
    if not is_contiguous and tensor.ndim and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{said} must be contiguous in its last dimension, and has strides {tensor.stride()}")


def check_launch(name: str, tensor: Tensor, kernel: Any) -> None:
    """Raise `ValueError` unless `tensor` is where `kernel` runs: a GPU, or anywhere under Triton's interpreter."""
    is_compiled = isinstance(kernel, triton.runtime.JITFunction)
    if is_compiled and not tensor.is_cuda:
        raise ValueError(f"{name} {tuple(tensor.shape)} is on {tensor.device}; a Triton kernel needs it on a CUDA GPU")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
