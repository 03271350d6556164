"""Products in int8 on a CPU: the weight quantised once, the activations as they come (W8A8, dynamic, symmetric)."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..native import InstructionSet, has_avx512, instruction_set, require_native_library
from ..weight_memory import empty_weight
from .gates import GATES, Gate
from .int8_reference import quantize_rows
from .product import Product

# Of the tiles that the weight is cut into, and of the blocks of two by two tiles that are computed at a time.
_TILE_ROWS = 16
_TILE_BYTES = 64
_BLOCK = 32
# What makes the left side unsigned, as VNNI wants it, is taken from the sums again.
_UNSIGNED_OFFSET = 128
_SCALE_BYTES = 4

_DTYPES = (torch.bfloat16, torch.float32)


class _Call(ctypes.Structure):
    """The same as `Call` in kernels/native/src/int8_linear.cpp."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "weight", "column_scales", "biases", "starts")),
        *((name, ctypes.c_void_p) for name in ("output", "quantized", "row_scales")),
        *((name, ctypes.c_int64) for name in ("input_stride", "num_rows", "num_outputs", "num_inputs")),
        *((name, ctypes.c_int64) for name in ("uses_amx", "gate")),
    )


def supports_int8(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the compiled kernels are there, and multiply activations of this dtype in int8."""
    return device.type == "cpu" and dtype in _DTYPES and has_avx512()


class Int8Product(Product):
    """x @ weightᵀ + bias, the weight's rows and those of x in int8 with a scale each.

    weight: [out, in], to be quantised, or int8 already with its rows' float32 `scales` [out]; bias: [out] or None.
    All may be freed afterwards. `instructions` to compute with, by default all that the processor has; there must be
    the compiled kernels. To be called by one thread at a time.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        instructions: InstructionSet | None = None,
        scales: Tensor | None = None,
    ) -> None:
        self._num_outputs, self._num_inputs = weight.shape
        quantized, scales = quantize_rows(weight) if scales is None else (weight, scales)
        missing = -self._num_outputs % _BLOCK
        self._weight = _tiles(pad(quantized, (0, -self._num_inputs % _TILE_BYTES, 0, missing)))
        self._scales = pad(scales, (0, missing))
        self._biases = torch.zeros_like(self._scales) if bias is None else pad(bias.float(), (0, missing))
        self._starts = pad(-_UNSIGNED_OFFSET * quantized.sum(1, dtype=torch.int32), (0, missing))
        self._padded_inputs = self._num_inputs + -self._num_inputs % _TILE_BYTES
        # Filled but for what a call brings: with one row the host's time counts.
        self._call = _Call(
            weight=self._weight.data_ptr(),
            column_scales=self._scales.data_ptr(),
            biases=self._biases.data_ptr(),
            starts=self._starts.data_ptr(),
            num_outputs=self._num_outputs,
            num_inputs=self._num_inputs,
            uses_amx=(instructions or instruction_set()) >= InstructionSet.AMX,
        )
        self._call_address = ctypes.addressof(self._call)
        library = require_native_library()
        self._compute = {
            torch.bfloat16: library.headrace_int8_linear_bfloat16,
            torch.float32: library.headrace_int8_linear_float32,
        }

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, in], bfloat16 or float32. Returns [n, out] of x's dtype.

        A row with something that is not finite gives a row in which nothing is.
        """
        assert x.shape[1] == self._num_inputs
        return self._run(x, Gate.NONE)

    def gated(self, activate: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
        """In bfloat16 what one of `GATES` gives is never written out."""
        gate = GATES.get(activate)
        if gate is None or gate_up.dtype != torch.bfloat16:
            return super().gated(activate, gate_up)
        assert gate_up.shape[1] == 2 * self._num_inputs
        return self._run(gate_up, gate)

    def _run(self, x: Tensor, gate: Gate) -> Tensor:
        num_rows = len(x)
        input_stride, stride = x.stride()
        if stride != 1:
            x, input_stride = x.contiguous(), x.shape[1]
        output = torch.empty(num_rows, self._num_outputs, dtype=x.dtype)
        padded_rows = num_rows + -num_rows % _BLOCK
        quantized_bytes = padded_rows * self._padded_inputs
        # To work in: the rows in int8, then their scales.
        room = torch.empty(quantized_bytes + padded_rows * _SCALE_BYTES, dtype=torch.uint8)
        begin = room.data_ptr()
        call = self._call
        call.input, call.input_stride, call.num_rows, call.gate = x.data_ptr(), input_stride, num_rows, gate
        call.output, call.quantized, call.row_scales = output.data_ptr(), begin, begin + quantized_bytes
        self._compute[x.dtype](self._call_address)
        return output


def _tiles(weight: Tensor) -> Tensor:
    """[out, in] to [out / 16, in / 64] tiles: of sixteen rows four bytes each, then the next four, as AMX has it."""
    rows, columns = weight.shape
    tiles = weight.view(rows // _TILE_ROWS, _TILE_ROWS, columns // _TILE_BYTES, _TILE_BYTES // 4, 4)
    tiles = tiles.permute(0, 2, 3, 1, 4)
    return empty_weight(tiles.shape, tiles.dtype, tiles.device).copy_(tiles)
