"""Products in int8 on a CPU: the weight quantised once, the activations as they come (W8A8, dynamic, symmetric)."""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..native import InstructionSet, has_bfloat16, instruction_set, native_library, require_native_library
from ..weight_memory import empty_weight
from .gates import GATES, Gate
from .int8_reference import quantize_rows
from .product import Product

# Of the tiles that the weight is cut into, and of the blocks of two by two tiles that are computed at a time.
_TILE_ROWS = 16
_TILE_BYTES = 64
_BLOCK = 32
# Inputs of an output that lie together in a tile: as many as one instruction multiplies and adds.
_TOGETHER, _TOGETHER_AVX2 = 4, 2
# What makes the left side unsigned, as VNNI wants it, is taken from the sums again.
_UNSIGNED_OFFSET = 128
_SCALE_BYTES = 4


class _Call(ctypes.Structure):
    """The same as `Call` in kernels/native/src/int8_call.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("input", "weight", "column_scales", "biases", "starts")),
        *((name, ctypes.c_void_p) for name in ("output", "quantized", "row_scales")),
        *((name, ctypes.c_int64) for name in ("input_stride", "num_rows", "num_outputs", "num_inputs")),
        *((name, ctypes.c_int64) for name in ("uses_amx", "gate")),
    )


def supports_int8(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the compiled kernels are there, and multiply activations of this dtype in int8."""
    if device.type != "cpu" or native_library() is None:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and has_bfloat16())


class Int8Product(Product):
    """x @ weightᵀ + bias, the weight's rows and those of x in int8 with a scale each.

    weight: [out, in], to be quantised, or int8 already with its rows' float32 `scales` [out]; bias: [out] or None.
    All may be freed afterwards. `instructions` to compute with, by default all that the processor has; there must be
    the compiled kernels. Without those for bfloat16 x is float32. To be called by one thread at a time.
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
        instructions = instructions or instruction_set()
        is_avx2 = instructions is InstructionSet.AVX2
        padded = pad(quantized, (0, -self._num_inputs % _TILE_BYTES, 0, missing))
        self._weight = _tiles(padded, _TOGETHER_AVX2 if is_avx2 else _TOGETHER)
        self._scales = pad(scales, (0, missing))
        self._biases = torch.zeros_like(self._scales) if bias is None else pad(bias.float(), (0, missing))
        self._starts = pad(-_UNSIGNED_OFFSET * quantized.sum(1, dtype=torch.int32), (0, missing))
        # AVX2 multiplies 16 bits: rows are widened once, the weight as it is read.
        self._row_bytes = padded.shape[1] * (2 if is_avx2 else 1)
        self._padding = 1 if is_avx2 else _BLOCK
        # Kept for a decode of one row, where the host's time counts.
        self._room = _room(self._padding, self._row_bytes)
        # Filled but for what a call brings.
        self._call = _Call(
            weight=self._weight.data_ptr(),
            column_scales=self._scales.data_ptr(),
            biases=self._biases.data_ptr(),
            starts=self._starts.data_ptr(),
            num_outputs=self._num_outputs,
            num_inputs=self._num_inputs,
            uses_amx=instructions >= InstructionSet.AMX,
        )
        self._call_address = ctypes.addressof(self._call)
        library = require_native_library()
        self._compute = (
            {torch.float32: library.headrace_int8_linear_avx2}
            if is_avx2
            else {
                torch.bfloat16: library.headrace_int8_linear_bfloat16,
                torch.float32: library.headrace_int8_linear_float32,
            }
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, in], of a dtype that `supports_int8` has here. Returns [n, out] of that dtype.

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
        num_rows = x.shape[0]
        input_stride, stride = x.stride()
        if stride != 1:
            x, input_stride = x.contiguous(), x.shape[1]
        output = torch.empty(num_rows, self._num_outputs, dtype=x.dtype)
        padded_rows = num_rows + -num_rows % self._padding
        quantized_bytes = padded_rows * self._row_bytes
        room = self._room if num_rows == 1 else _room(padded_rows, self._row_bytes)
        begin = room.data_ptr()
        call = self._call
        call.input, call.input_stride, call.num_rows, call.gate = x.data_ptr(), input_stride, num_rows, gate
        call.output, call.quantized, call.row_scales = output.data_ptr(), begin, begin + quantized_bytes
        self._compute[x.dtype](self._call_address)
        return output


def _room(num_rows: int, row_bytes: int) -> Tensor:
    """To work in: the rows in int8, then their scales."""
    return torch.empty(num_rows * (row_bytes + _SCALE_BYTES), dtype=torch.uint8)


def _tiles(weight: Tensor, together: int) -> Tensor:
    """[out, in] to [out / 16, in / 64] tiles: of sixteen rows `together` bytes each, then as many more."""
    rows, columns = weight.shape
    shape = (rows // _TILE_ROWS, _TILE_ROWS, columns // _TILE_BYTES, _TILE_BYTES // together, together)
    tiles = weight.view(shape)
    tiles = tiles.permute(0, 2, 3, 1, 4)
    return empty_weight(tiles.shape, tiles.dtype, tiles.device).copy_(tiles)
