"""The figures of LoRA adapters' products for `gpu.py`: what they add to a projection's time, and against torch."""

from collections.abc import Iterator
from functools import partial

import numpy
import torch
from gpu_kernels import Sizes, assert_near, timed, tolerance_of
from gpu_table import Line
from torch import Tensor
from torch.nn.functional import linear

from headrace.kernels.linear import AdaptedRows, Addition
from headrace.kernels.linear.adapted import AdaptedProduct
from headrace.kernels.linear.plain import PlainProduct
from headrace.kernels.lora import AdapterMatrices, TokenTiles
from headrace.kernels.lora.triton import add_low_rank_triton

_NUM_ADAPTERS, _RANK = 8, 16


class LoraCase:
    """A layer's projection to queries, keys and values with eight adapters, each of which a row in nine has."""

    def __init__(self, sizes: Sizes, num_rows: int) -> None:
        kv_size = sizes.kv_heads * sizes.head_dim
        self.parts = ((0, sizes.hidden), (sizes.hidden, kv_size), (sizes.hidden + kv_size, kv_size))
        outputs, device, dtype = sizes.hidden + 2 * kv_size, sizes.device, sizes.dtype
        self.weight = (torch.randn(outputs, sizes.hidden, device=device) * sizes.hidden**-0.5).to(dtype)
        self.x = torch.randn(num_rows, sizes.hidden, device=device).to(dtype)
        shape = (_NUM_ADAPTERS, _RANK, sizes.hidden, outputs)
        self.matrices = AdapterMatrices.blank(*shape, self.parts, dtype, device)
        self.matrices.down.copy_(torch.randn(self.matrices.down.shape, device=device) * sizes.hidden**-0.5)
        self.matrices.up.copy_(torch.randn(self.matrices.up.shape, device=device) / 4)
        self.matrices.ranks.fill_(_RANK)
        slots = numpy.arange(num_rows) % (_NUM_ADAPTERS + 1) - 1
        self.tiles = TokenTiles.of(slots, _NUM_ADAPTERS, device)
        # As a CPU has it: all adapters' matrices side by side, rows masked.
        down, up, self._rows = self.matrices.down, self.matrices.up, AdaptedRows()
        additions = [
            Addition(start, down[:, part].flatten(0, 1), up[:, :, start : start + size].flatten(0, 1))
            for part, (start, size) in enumerate(self.parts)
        ]
        self._in_torch = AdaptedProduct(PlainProduct(self.weight, None), self._rows, additions)
        owners = torch.arange(_NUM_ADAPTERS, device=device).repeat_interleave(_RANK)
        self._foreign = torch.from_numpy(slots).to(device).unsqueeze(1) != owners

    def add(self, output: Tensor) -> Tensor:
        add_low_rank_triton(output, self.x, self.matrices, self.tiles)
        return output

    def in_torch(self) -> Tensor:
        """The product and what is added to it."""
        with self._rows.without(self._foreign):
            return self._in_torch(self.x)


def check_lora(sizes: Sizes) -> None:
    """Against torch's. Raises `AssertionError`."""
    for rows in (40, *sizes.linear_rows):
        case = LoraCase(sizes, rows)
        assert_near(case.add(linear(case.x, case.weight)), case.in_torch(), tolerance_of(sizes))


def lora_lines(sizes: Sizes) -> Iterator[Line]:
    """Adding what adapters do, against the product that it is added to, and both against torch's."""
    for num_rows in sizes.linear_rows:
        case = LoraCase(sizes, num_rows)
        output = linear(case.x, case.weight)
        of_product = timed(partial(linear, case.x, case.weight), sizes)
        added = timed(partial(case.add, output), sizes)
        of_torch = timed(case.in_torch, sizes)
        title = f"LoRA on qkv, {num_rows} rows of {_NUM_ADAPTERS} adapters: times the product's own"
        yield Line(title, added.median * 1e3, "ms", added.median / of_product.median, spread=added.spread)
        both = added.median + of_product.median
        yield Line("  with the product: times as fast as torch", both * 1e3, "ms", of_torch.median / both)
