"""What every Triton wrapper asks of its arguments before it launches anything."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

from .triton_assembler import cuda_of_driver, use_newer_assembler

# Before any kernel is compiled: every wrapper asks here.
use_newer_assembler(cuda_of_driver()[0])

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
    is_dense = tensor.is_contiguous() if is_contiguous else _ends_dense(tensor)
    # Several for each launch, and a step has hundreds of those: what is wrong is looked for only where something is.
    if _fits(tensor.shape, shape) and tensor.dtype in dtypes and tensor.device == device and is_dense:
        return
    raise ValueError(f"{name} {tuple(tensor.shape)} {_problem(tensor, shape, dtypes, device, is_contiguous)}")


def _problem(
    tensor: Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    is_contiguous: bool,
) -> str:
    if not _fits(tensor.shape, shape):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        return f"must have the shape [{wanted}]"
    if tensor.dtype not in dtypes:
        return f"is {_name(tensor.dtype)}, and must be {' or '.join(map(_name, dtypes))}"
    if tensor.device != device:
        return f"is on {tensor.device}, and must be on {device}"
    if is_contiguous:
        return f"must be contiguous, and has strides {tensor.stride()}"
    return f"must be contiguous in its last dimension, and has strides {tensor.stride()}"


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    if shape == wanted:
        return True
    return len(shape) == len(wanted) and all(
        want is None or have == want for have, want in zip(shape, wanted, strict=True)
    )


def _ends_dense(tensor: Tensor) -> bool:
    return not tensor.ndim or tensor.shape[-1] <= 1 or tensor.stride(-1) == 1


def check_launch(name: str, tensor: Tensor, kernel: Any) -> None:
    """Raise `ValueError` unless `tensor` is where `kernel` runs: a GPU, or anywhere under Triton's interpreter."""
    is_compiled = isinstance(kernel, triton.runtime.JITFunction)
    if is_compiled and not tensor.is_cuda:
        raise ValueError(f"{name} {tuple(tensor.shape)} is on {tensor.device}; a Triton kernel needs it on a CUDA GPU")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
