"""The compiled product for bfloat16 on a CPU with AVX-512 and no AMX, the weight in a layout of its own."""

import ctypes

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..native import InstructionSet, instruction_set, require_native_library
from ..weight_memory import empty_weight
from .product import Product

# Outputs that lie together, and what the number of inputs must be a multiple of.
_BLOCK, _DEPTH_STEP = 32, 8


class _Call(ctypes.Structure):
    """The same as `Call` in kernels/native/src/packed_linear.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "output")),
        *((name, ctypes.c_int64) for name in ("x_stride", "num_rows", "num_outputs", "depth")),
    )


def takes_packed(weight: Tensor) -> bool:
    """Whether `PackedProduct` can multiply by this weight, on this processor."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.shape[1] % _DEPTH_STEP == 0
        and instruction_set() >= InstructionSet.AVX512_BF16
    )


class PackedProduct(Product):
    """x @ weightᵀ + bias. weight: one of `takes_packed`, [out, in]; bias: [out] or None. See `Product`.

    Both may be freed afterwards. To be called by one thread at a time.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._num_outputs, self._depth = weight.shape
        missing = -self._num_outputs % _BLOCK
        self._weight = _pairs(pad(weight, (0, 0, 0, missing)))
        wide = torch.zeros(self._num_outputs) if bias is None else bias.float()
        self._bias = pad(wide, (0, missing))
        # Filled but for what a call brings: with one row the host's time counts.
        self._call = _Call(
            weight=self._weight.data_ptr(),
            bias=self._bias.data_ptr(),
            num_outputs=self._num_outputs,
            depth=self._depth,
        )
        self._call_address = ctypes.addressof(self._call)
        self._compute = require_native_library().headrace_packed_product

    def __call__(self, x: Tensor) -> Tensor:
        num_rows, depth = x.shape
        assert depth == self._depth
        assert x.dtype == torch.bfloat16
        x_stride, stride = x.stride()
        if stride != 1:
            x, x_stride = x.contiguous(), depth
        output = torch.empty(num_rows, self._num_outputs, dtype=torch.bfloat16)
        call = self._call
        call.x, call.x_stride, call.num_rows = x.data_ptr(), x_stride, num_rows
        call.output = output.data_ptr()
        self._compute(self._call_address)
        return output


def _pairs(weight: Tensor) -> Tensor:
    """[out, in] to [out / 32, in / 2, 32, 2]: of 32 rows two inputs each, then the next two."""
    rows, columns = weight.shape
    paired = weight.view(rows // _BLOCK, _BLOCK, columns // 2, 2).transpose(1, 2)
    return empty_weight(paired.shape, weight.dtype, weight.device).copy_(paired)
