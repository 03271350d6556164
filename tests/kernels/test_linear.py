"""The packed product against the plain one."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from torch.nn.functional import linear

from headrace.kernels.linear import Linear, plain
from headrace.kernels.linear.float32 import Float32Product, can_take_float32
from headrace.kernels.linear.packed import PackedProduct, takes_packed

from .tolerances import DTYPES, assert_close

pytestmark = pytest.mark.usefixtures("_nan_filled_outputs")

# Shapes that the compiled kernel multiplies in blocks: one row, all tails, and more rows than it takes.
TILED = [(1, 64, 96), (16, 32, 32), (17, 96, 64), (31, 32, 160), (48, 64, 64), (128, 32, 64), (129, 32, 64)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"), [(1, 7, 5), (3, 33, 64), (0, 16, 8), (65, 96, 72), (2, 33, 36), (300, 1, 9), *TILED]
)
def test_against_the_plain_product(rows, outputs, inputs, with_bias, dtype):
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(outputs, inputs, generator=generator) * inputs**-0.5).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if with_bias else None
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    packed = Linear(weight.clone(), bias)
    packed.prepack()
    assert_close(packed(x), linear(x, weight, bias))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [*range(1, 15), 96, 97, 200])
def test_every_number_of_rows_in_pairs_of_inputs(rows, threads, request):
    """Of each tile's size, and of more than stay in a cache: on AMX, too, where it is not what is chosen."""
    generator = torch.Generator().manual_seed(rows)
    weight = (torch.randn(72, 136, generator=generator) * 136**-0.5).to(torch.bfloat16)
    if not takes_packed(weight):
        pytest.skip("the compiled kernels are not there, or cannot run on this processor")
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(threads)
    bias = torch.randn(72, generator=generator).to(torch.bfloat16)
    x = torch.randn(rows, 136, generator=generator).to(torch.bfloat16)
    assert_close(PackedProduct(weight, bias)(x), linear(x, weight, bias))


@pytest.mark.parametrize(
    ("kind", "takes"), [(Float32Product, can_take_float32), (PackedProduct, takes_packed)], ids=["avx2", "avx512"]
)
@pytest.mark.parametrize("fits", [True, False], ids=["of-bfloat16", "of-float32"])
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [*range(14), 200, 700])
def test_every_number_of_rows_in_float32(rows, threads, fits, kind, takes, request):
    """Of each tile's size, and of more than stay in a cache: AVX2's, too, where it is not what is chosen."""
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(72, 136, generator=generator) * 136**-0.5
    if fits:
        weight = weight.bfloat16().float()
    if not takes(weight):
        pytest.skip("the compiled kernels are not there, or cannot run on this processor")
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(threads)
    bias = torch.randn(72, generator=generator)
    x = torch.randn(rows, 140, generator=generator)[:, 2:138]
    product = kind(weight, bias)
    assert (product._weight.dtype == torch.bfloat16) is fits
    assert_close(product(x), linear(x.double(), weight.double(), bias.double()).float())


@pytest.mark.skipif(
    not (torch._C._has_mkldnn and torch.ops.mkldnn._is_mkldnn_bf16_supported()), reason="oneDNN has no bfloat16 here"
)
def test_onednns_layout_where_there_is_no_kernel_of_ours(monkeypatch):
    for takes in ("takes_weight", "takes_packed"):
        monkeypatch.setattr(plain, takes, lambda weight: False)
    weight, bias = (torch.randn(33, 64) / 8).bfloat16(), torch.randn(33).bfloat16()
    product = plain.plain_product(weight, bias)
    assert isinstance(product, plain.OneDnnProduct)
    for rows in (0, 1, 70):
        x = torch.randn(rows, 64).bfloat16()
        assert_close(product(x), linear(x, weight, bias))


def test_bfloat16_on_a_processor_that_onednn_has_none_for():
    """As without AVX-512, where the compiled kernels do not run either."""
    code = """
import torch
from headrace.kernels.linear import Linear, plain
x, weight = torch.arange(24.0).view(2, 12).bfloat16(), torch.eye(12).bfloat16()
packed = Linear(weight.clone())
packed.prepack()
assert torch.equal(packed(x), x)
"""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "HEADRACE_NATIVE_KERNELS": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_packed_weight_is_given_up():
    packed = Linear(torch.randn(16, 16, dtype=torch.bfloat16))
    packed.prepack()
    with pytest.raises(AssertionError, match="packed"):
        _ = packed.weight


def test_a_part_of_a_wider_tensor_is_taken_as_input():
    """Rows that do not lie next to each other, as a slice of a projection has them."""
    weight, wide = torch.randn(24, 16, dtype=torch.bfloat16), torch.randn(30, 40, dtype=torch.bfloat16)
    packed = Linear(weight.clone())
    packed.prepack()
    assert_close(packed(wide[:, 8:24]), linear(wide[:, 8:24], weight))
