"""Compiled products on a CPU whose weight lies in blocks of outputs."""

import ctypes

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..native import require_native_library
from ..weight_memory import empty_weight
from .product import Product

# Outputs that any of the functions has in a block: biases are padded to that.
_MOST_TOGETHER = 32
# The bits of a float32 that bfloat16 does not have.
_LOWER_BITS = 0xFFFF


def float32_blocks(weight: Tensor, size: int) -> Tensor:
    """A weight of float32, [out, in], in blocks of so many outputs, zeros after the last: [out / size, in, size].

    One that bfloat16 can hold as it is, such as one that a checkpoint has in bfloat16, is kept in that: half the
    memory, and half of what a decode reads, for the same products. It is [out / size, in, size / 2, 2] then, each of a
    block's first half of outputs beside one of the second.
    """
    padded = pad(weight, (0, 0, 0, -len(weight) % size))
    if _fits_bfloat16(weight):
        pairs = padded.view(-1, 2, size // 2, weight.shape[1]).permute(0, 3, 2, 1)
        return empty_weight(pairs.shape, torch.bfloat16, weight.device).copy_(pairs)
    blocks = padded.view(-1, size, weight.shape[1]).transpose(1, 2)
    return empty_weight(blocks.shape, weight.dtype, weight.device).copy_(blocks)


def _fits_bfloat16(weight: Tensor) -> bool:
    return not bool((weight.view(torch.int32) & _LOWER_BITS).any())


class Call(ctypes.Structure):
    """The same as `Call` in kernels/native/src/product_tiles.h; that of a function may have more behind it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "output")),
        *((name, ctypes.c_int64) for name in ("x_stride", "num_rows", "num_outputs", "depth", "is_narrow")),
    )


class BlockedProduct(Product):
    """x @ weightᵀ + bias by the compiled function `kernel`. See `Product`.

    weight: as the function reads it, blocks of outputs made from one of `shape`, [out, in]; bias: [out] or None, which
    may be freed afterwards; dtype: of x and of what is returned; `call`: with what the function takes beside that. To
    be called by one thread at a time.
    """

    def __init__(
        self,
        kernel: str,
        weight: Tensor,
        bias: Tensor | None,
        shape: tuple[int, int],
        dtype: torch.dtype,
        call: Call | None = None,
    ) -> None:
        self._num_outputs, self._depth = shape
        self._dtype = dtype
        self._weight = weight
        wide = torch.zeros(self._num_outputs) if bias is None else bias.float()
        self._bias = pad(wide, (0, -self._num_outputs % _MOST_TOGETHER))
        # Filled but for what a call brings: with one row the host's time counts.
        self._call = call or Call()
        self._call.weight, self._call.bias = self._weight.data_ptr(), self._bias.data_ptr()
        self._call.num_outputs, self._call.depth = shape
        self._call.is_narrow = weight.dtype == torch.bfloat16
        self._call_address = ctypes.addressof(self._call)
        self._compute = getattr(require_native_library(), kernel)

    def __call__(self, x: Tensor) -> Tensor:
        num_rows, depth = x.shape
        assert depth == self._depth
        assert x.dtype == self._dtype
        x_stride, stride = x.stride()
        if stride != 1:
            x, x_stride = x.contiguous(), depth
        output = torch.empty(num_rows, self._num_outputs, dtype=self._dtype)
        call = self._call
        call.x, call.x_stride, call.num_rows = x.data_ptr(), x_stride, num_rows
        call.output = output.data_ptr()
        self._compute(self._call_address)
        return output
