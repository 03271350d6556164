"""The compiled product for float32 on a CPU with AVX2 and no AVX-512, the weight in a layout of its own."""

import ctypes

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..native import InstructionSet, instruction_set, native_library, require_native_library
from ..weight_memory import empty_weight
from .product import Product

# Outputs that lie together, how many of them a register holds, and what the number of inputs must be a multiple of.
_BLOCK, _LANES, _DEPTH_STEP = 16, 8, 8
# The bits of a float32 that bfloat16 does not have.
_LOWER_BITS = 0xFFFF


class _Call(ctypes.Structure):
    """The same as `Call` in kernels/native/src/float32_product.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "output")),
        *((name, ctypes.c_int64) for name in ("x_stride", "num_rows", "num_outputs", "depth", "is_narrow")),
    )


def takes_float32(weight: Tensor) -> bool:
    """Whether `Float32Product` can multiply by this weight, and is the fastest on this processor."""
    return can_take_float32(weight) and instruction_set() is InstructionSet.AVX2


def can_take_float32(weight: Tensor) -> bool:
    """Whether `Float32Product` can multiply by this weight: with AVX-512 torch's own product is the faster one."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and weight.shape[1] % _DEPTH_STEP == 0
        and weight.numel() > 0
        and native_library() is not None
    )


class Float32Product(Product):
    """x @ weightᵀ + bias. weight: one that `can_take_float32`, [out, in]; bias: [out] or None. See `Product`.

    A weight that bfloat16 can hold as it is, such as one that a checkpoint has in bfloat16, is kept in that: half the
    memory, and half of what a decode reads, for the same products. Both may be freed afterwards. To be called by one
    thread at a time.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._num_outputs, self._depth = weight.shape
        missing = -self._num_outputs % _BLOCK
        is_narrow = not (weight.view(torch.int32) & _LOWER_BITS).any()
        padded = pad(weight, (0, 0, 0, missing))
        self._weight = _pairs(padded) if is_narrow else _blocks(padded)
        self._bias = torch.zeros(self._num_outputs + missing) if bias is None else pad(bias, (0, missing))
        # Filled but for what a call brings: with one row the host's time counts.
        self._call = _Call(
            weight=self._weight.data_ptr(),
            bias=self._bias.data_ptr(),
            num_outputs=self._num_outputs,
            depth=self._depth,
            is_narrow=is_narrow,
        )
        self._call_address = ctypes.addressof(self._call)
        self._compute = require_native_library().headrace_float32_product

    def __call__(self, x: Tensor) -> Tensor:
        num_rows, depth = x.shape
        assert depth == self._depth
        assert x.dtype == torch.float32
        x_stride, stride = x.stride()
        if stride != 1:
            x, x_stride = x.contiguous(), depth
        output = torch.empty(num_rows, self._num_outputs)
        call = self._call
        call.x, call.x_stride, call.num_rows = x.data_ptr(), x_stride, num_rows
        call.output = output.data_ptr()
        self._compute(self._call_address)
        return output


def _blocks(weight: Tensor) -> Tensor:
    """[out, in] to [out / 16, in, 16]."""
    blocks = weight.view(-1, _BLOCK, weight.shape[1]).transpose(1, 2)
    return empty_weight(blocks.shape, weight.dtype, weight.device).copy_(blocks)


def _pairs(weight: Tensor) -> Tensor:
    """[out, in] to [out / 16, in, 8, 2] of bfloat16: each of a block's first eight outputs beside one of the others."""
    pairs = weight.view(-1, 2, _LANES, weight.shape[1]).permute(0, 3, 2, 1)
    return empty_weight(pairs.shape, torch.bfloat16, weight.device).copy_(pairs)
