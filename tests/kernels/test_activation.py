"""Gated activations against the obvious torch."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace.kernels.activation import clamped_swiglu, gelu_tanh_and_mul, silu_and_mul
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_and_ups_in_turns_that_are_cut_off(dtype):
    """One pair at a time, beyond the limit on every side."""
    pairs = [(gate, up) for gate in (-50.0, -8.0, -0.5, 0.0, 2.0, 7.0, 9.0) for up in (-9.0, -1.0, 0.0, 3.0, 8.0)]
    gate_up = torch.tensor(pairs, dtype=dtype).view(5, -1)
    before = gate_up.clone()
    expected = []
    for gate, up in pairs:
        gate, up = min(gate, 7.0), max(-7.0, min(up, 7.0))
        expected.append((up + 1) * gate / (1 + math.exp(-1.702 * gate)))
    assert_close(clamped_swiglu(gate_up, 7.0, 1.702).flatten(), torch.tensor(expected, dtype=dtype))
    assert torch.equal(gate_up, before)
