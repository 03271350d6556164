"""LayerNorm on the GPU against the obvious torch."""

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

from headrace.kernels.layer_norm.reference import layer_norm_reference
from headrace.kernels.layer_norm.triton import add_layer_norm_triton, layer_norm_triton
from headrace.kernels.triton_norms import MAX_NORM_SIZE

from .tolerances import assert_close

pytestmark = pytest.mark.usefixtures("_nan_filled_outputs")


@pytest.mark.parametrize("shape", [(1, 72), (13, 101), (5, 3, 20), (2, 4544), (0, 8)], ids=str)
def test_layer_norm(shape, triton_dtype, device):
    x = (torch.randn(shape, device=device) * 3 + 2).to(triton_dtype)
    weight, bias = torch.randn(2, shape[-1], device=device).to(triton_dtype)
    assert_close(layer_norm_triton(x, weight, bias, 1e-5), layer_norm_reference(x, weight, bias, 1e-5))


@pytest.mark.parametrize("shape", [(1, 72), (13, 101), (5, 576)], ids=str)
def test_add_layer_norm(shape, triton_dtype, device):
    """On parts of wider tensors, whose rows do not lie next to each other."""
    rows, size = shape
    weight, bias = torch.randn(2, size, device=device).to(triton_dtype)
    x, residual = (torch.randn(rows, size + 3, device=device).to(triton_dtype)[:, :size] for _ in range(2))
    before, expected_residual = x.clone(), residual + x
    normed = add_layer_norm_triton(x, residual, weight, bias, 1e-5)
    assert torch.equal(residual, expected_residual)
    assert torch.equal(x, before)
    assert_close(normed, layer_norm_reference(expected_residual, weight, bias, 1e-5))


def test_of_zeros_it_is_the_bias(device):
    bias = torch.arange(8.0, device=device)
    assert torch.equal(layer_norm_triton(torch.zeros(2, 8, device=device), bias, bias, 1e-6), bias.expand(2, 8))


ERRORS = {
    "weight": (lambda x: (x, x[0, :5], x[0], 1e-5), r"weight \(5,\) must have the shape \[8\]"),
    "bias": (lambda x: (x, x[0], x[0, :5], 1e-5), r"bias \(5,\) must have the shape \[8\]"),
    "dtype": (lambda x: (x.double(), x[0], x[0], 1e-5), r"x \(2, 8\) is float64, and must be float32 or"),
    "mixed": (lambda x: (x, x[0].half(), x[0], 1e-5), r"weight \(8,\) is float16, and must be float32"),
    "device": (lambda x: (x, x[0], x[0].to("meta"), 1e-5), r"bias \(8,\) is on meta"),
}


@pytest.mark.parametrize(("arguments", "message"), ERRORS.values(), ids=ERRORS)
def test_arguments_that_do_not_fit_are_named(arguments, message, device):
    with pytest.raises(ValueError, match=message):
        layer_norm_triton(*arguments(torch.ones(2, 8, device=device)))


def test_rows_that_fit_no_program_are_refused(device):
    x = torch.ones(1, MAX_NORM_SIZE + 1, device=device)
    with pytest.raises(ValueError, match=r"x \(1, 65537\) has rows of 65537 numbers; at most 65536"):
        layer_norm_triton(x, x[0], x[0], 1e-5)


def test_a_residual_of_another_shape_is_named(device):
    x = torch.ones(2, 8, device=device)
    with pytest.raises(ValueError, match=r"residual \(1, 8\) must have the shape \[2, 8\]"):
        add_layer_norm_triton(x, x[:1], x[0], x[0], 1e-5)
