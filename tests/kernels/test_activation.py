"""Gated activations against the obvious torch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace.kernels.activation import gelu_tanh_and_mul, silu_and_mul
from headrace.kernels.activation.reference import gelu_tanh_and_mul_reference, silu_and_mul_reference

from .tolerances import DTYPES, assert_close

pytestmark = pytest.mark.usefixtures("_nan_filled_outputs")

GATES = {
    "silu": (silu_and_mul, silu_and_mul_reference),
    "gelu": (gelu_tanh_and_mul, gelu_tanh_and_mul_reference),
}
Activation = Callable[[Tensor], Tensor]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 3), (0, 8), (13, 101), (7, 1536)], ids=str)
@pytest.mark.parametrize(("activation", "reference"), GATES.values(), ids=GATES)
def test_against_the_reference(activation: Activation, reference: Activation, shape, dtype):
    rows, size = shape
    gate_up = (torch.randn(rows, 2 * size, generator=torch.Generator().manual_seed(size)) * 4).to(dtype)
    assert_close(activation(gate_up), reference(gate_up))
    wider = torch.cat([gate_up, torch.full((rows, 5), torch.nan, dtype=dtype)], dim=1)
    assert_close(activation(wider[:, : 2 * size]), reference(gate_up))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("activation", "reference"), GATES.values(), ids=GATES)
def test_every_gate_that_is_near_saturation(activation: Activation, reference: Activation, dtype):
    gates = torch.cat([torch.linspace(-30, 30, 4001), torch.tensor([-1e4, -200.0, -0.0, 200.0, 1e4, torch.nan])])
    gate_up = torch.stack([gates, torch.ones_like(gates)], dim=1).to(dtype)
    torch.testing.assert_close(activation(gate_up), reference(gate_up), rtol=8e-3, atol=1e-6, equal_nan=True)
