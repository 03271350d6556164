"""Gated activations within products: which of them there are, and who leaves them to the product that it wraps."""

import re
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from headrace.kernels.activation import silu_and_mul
from headrace.kernels.linear import AdaptedRows, Addition, SlottedRows
from headrace.kernels.linear.adapted import AdaptedProduct
from headrace.kernels.linear.gates import Gate
from headrace.kernels.linear.product import Product
from headrace.kernels.linear.slotted import SlottedProduct
from headrace.kernels.lora import AdapterMatrices

SOURCES = Path(__file__).parents[2] / "kernels" / "native" / "src"


class Gating(Product):
    """Counts what it gates itself."""

    def __init__(self) -> None:
        self.num_gated = 0

    def __call__(self, x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True).expand(-1, 8).clone()

    def gated(self, activate: Callable[[Tensor], Tensor], gate_up: Tensor) -> Tensor:
        self.num_gated += 1
        return super().gated(activate, gate_up)


def test_they_are_numbered_as_in_the_compiled_kernels():
    """Where those run their answers tell; elsewhere nothing else would."""
    found = re.search(r"enum class Gate : std::int64_t \{ (.+) \};", (SOURCES / "activation.h").read_text())
    assert found is not None
    assert dict(enumerate(found[1].split(", "))) == {gate.value: gate.name.lower() for gate in Gate}


def test_who_adds_nothing_leaves_them_to_the_product():
    gate_up, product, rows = torch.randn(3, 8), Gating(), AdaptedRows()
    adapted = AdaptedProduct(product, rows, [Addition(0, torch.ones(1, 4), torch.ones(1, 8))])
    matrices = AdapterMatrices.blank(1, 1, 4, 8, ((0, 8),), torch.float32, torch.device("cpu"))
    slotted = SlottedProduct(product, SlottedRows(), matrices)
    activated = silu_and_mul(gate_up)
    for wrapping in (adapted, slotted):
        assert torch.equal(wrapping.gated(silu_and_mul, gate_up), product(activated))
    assert product.num_gated == 2
    with rows.without(torch.zeros(3, 1, dtype=torch.bool)):
        torch.testing.assert_close(adapted.gated(silu_and_mul, gate_up), 2 * product(activated))
    assert product.num_gated == 2
