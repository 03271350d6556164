"""Gated activations on the GPU against the obvious torch."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

from headrace.kernels.activation.reference import gelu_tanh_and_mul_reference, silu_and_mul_reference
from headrace.kernels.activation.triton import gelu_tanh_and_mul_triton, silu_and_mul_triton

from .tolerances import assert_close

# The interpreter's sigmoid overflows on its way to zero, and says so.
pytestmark = [
    pytest.mark.usefixtures("_nan_filled_outputs"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),
]

GATES = {
    "silu": (silu_and_mul_triton, silu_and_mul_reference),
    "gelu": (gelu_tanh_and_mul_triton, gelu_tanh_and_mul_reference),
}
Activation = Callable[[Tensor], Tensor]


@pytest.mark.parametrize("shape", [(1, 3), (0, 8), (13, 101), (3, 1536)], ids=str)
@pytest.mark.parametrize(("activation", "reference"), GATES.values(), ids=GATES)
def test_against_the_reference(activation: Activation, reference: Activation, shape, triton_dtype, device):
    rows, size = shape
    gate_up = (torch.randn(rows, 2 * size, generator=torch.Generator().manual_seed(size)) * 4).to(device, triton_dtype)
    assert_close(activation(gate_up), reference(gate_up))
    wider = torch.cat([gate_up, torch.full((rows, 5), torch.nan, dtype=triton_dtype, device=device)], dim=1)
    assert_close(activation(wider[:, : 2 * size]), reference(gate_up))


@pytest.mark.parametrize(("activation", "reference"), GATES.values(), ids=GATES)
def test_every_gate_that_is_near_saturation(activation: Activation, reference: Activation, triton_dtype, device):
    gates = torch.cat([torch.linspace(-30, 30, 4001), torch.tensor([-200.0, -0.0, 200.0])])
    gate_up = torch.cat([gates, torch.ones_like(gates)]).unsqueeze(0).to(device, triton_dtype)
    assert_close(activation(gate_up), reference(gate_up))


@pytest.mark.parametrize(
    ("gate_up", "message"),
    [
        (torch.zeros(2, 3), r"gate_up \(2, 3\) must have an even number of columns"),
        (torch.zeros(2, 4, dtype=torch.int32), r"gate_up \(2, 4\) is int32"),
        (torch.zeros(4), r"gate_up \(4,\) must have the shape \[any, any\]"),
        (torch.zeros(4, 2).T, r"gate_up \(2, 4\) must be contiguous in its last dimension"),
    ],
)
def test_arguments_that_do_not_fit_are_named(gate_up, message, device):
    with pytest.raises(ValueError, match=message):
        silu_and_mul_triton(gate_up.to(device))
