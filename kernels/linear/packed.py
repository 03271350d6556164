"""The compiled product for bfloat16 on a CPU with AVX-512 and no AMX, the weight in a layout of its own."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..native import InstructionSet, instruction_set, require_native_library

# Outputs that lie together, and what the number of inputs must be a multiple of.
_BLOCK, _DEPTH_STEP = 32, 8
_ALIGNMENT_BYTES = 64


def takes_packed(weight: Tensor) -> bool:
    """Whether `PackedProduct` can multiply by this weight, on this processor."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and weight.shape[1] % _DEPTH_STEP == 0
        and instruction_set() >= InstructionSet.AVX512_BF16
    )


class PackedProduct:
    """x @ weightᵀ + bias. weight: one of `takes_packed`, [out, in]; bias: [out] or None. See `Product`.

    Both may be freed afterwards.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._num_outputs, self._depth = weight.shape
        missing = -self._num_outputs % _BLOCK
        self._weight = _pairs(pad(weight, (0, 0, 0, missing)))
        wide = torch.zeros(self._num_outputs) if bias is None else bias.float()
        self._bias = pad(wide, (0, missing))

    def __call__(self, x: Tensor) -> Tensor:
        assert x.shape[1] == self._depth
        assert x.dtype == torch.bfloat16
        if x.stride(1) != 1:
            x = x.contiguous()
        output = torch.empty(len(x), self._num_outputs, dtype=x.dtype)
        require_native_library().headrace_packed_linear(
            x.data_ptr(),
            x.stride(0),
            self._weight.data_ptr(),
            self._bias.data_ptr(),
            output.data_ptr(),
            len(x),
            self._num_outputs,
            self._depth,
        )
        return output


def _pairs(weight: Tensor) -> Tensor:
    """[out, in] to [out / 32, in / 2, 32, 2]: of 32 rows two inputs each, then the next two."""
    rows, columns = weight.shape
    paired = weight.view(rows // _BLOCK, _BLOCK, columns // 2, 2).transpose(1, 2)
    packed = torch.empty(paired.shape, dtype=weight.dtype)
    assert packed.data_ptr() % _ALIGNMENT_BYTES == 0
    return packed.copy_(paired)
