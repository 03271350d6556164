"""The compiled product with weights of four and eight bits in groups, against that of the weights they stand for."""

from functools import partial

import pytest
import torch
from torch import Tensor

from headrace.kernels.linear import Fp4Weight, Int4Weight, Linear, QuantizedWeight, ScaledWeight
from headrace.kernels.linear.float32 import Float32Product
from headrace.kernels.linear.grouped import GroupedProduct, can_take_grouped, supports_grouped
from headrace.kernels.linear.packed import PackedProduct
from headrace.kernels.native import InstructionSet, has_avx512, has_bfloat16, instruction_set, native_library

from .tolerances import assert_close

pytestmark = [
    pytest.mark.usefixtures("_nan_filled_outputs"),
    pytest.mark.skipif(native_library() is None, reason="needs the compiled kernels"),
]

# Outputs, inputs and group size: tails of both, one group of all, groups that the last one is a part of.
SHAPES = [(72, 144, 32), (16, 64, 64), (1, 16, 16), (40, 176, 128), (33, 96, 96), (24, 136, 32)]
needs_avx512 = pytest.mark.skipif(not has_avx512(), reason="needs AVX-512")
needs_bfloat16 = pytest.mark.skipif(not has_bfloat16(), reason="needs AVX-512 with bfloat16")
# Of activations, with what instructions.
KINDS = [
    pytest.param(torch.float32, InstructionSet.AVX2, id="avx2"),
    pytest.param(torch.float32, InstructionSet.AVX512, marks=needs_avx512, id="avx512"),
    pytest.param(torch.bfloat16, InstructionSet.AVX512_BF16, marks=needs_bfloat16, id="avx512-bfloat16"),
]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def scales(groups: int, outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    return (numbers(groups, outputs, seed=1) * inputs**-0.5 / 8).to(dtype)


def zeros(outputs: int, inputs: int, group_size: int, dtype: torch.dtype = torch.half) -> QuantizedWeight:
    return four_bits(outputs, inputs, group_size, dtype, lambda each: torch.randint_like(each, 1, 17).to(torch.uint8))


def minima(outputs: int, inputs: int, group_size: int, dtype: torch.dtype = torch.half) -> QuantizedWeight:
    return four_bits(outputs, inputs, group_size, dtype, lambda each: 8 * each + each / 3)


def four_bits(outputs: int, inputs: int, group_size: int, dtype: torch.dtype, zeros_of, order=None) -> Int4Weight:
    values = torch.randint(0, 16, (outputs, inputs), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
    # Groups of which no GPU takes any are one.
    size = group_size if group_size % 32 == 0 else inputs
    factors = scales(-(-inputs // size), outputs, inputs, dtype)
    return Int4Weight.pack(values, factors, zeros_of(factors), size, order)


def symmetric(outputs: int, inputs: int, group_size: int, dtype: torch.dtype = torch.half) -> QuantizedWeight:
    return four_bits(outputs, inputs, group_size, dtype, lambda each: torch.full_like(each, 8).to(torch.uint8))


def eight_bits(outputs: int, inputs: int, group_size: int, dtype: torch.dtype = torch.half) -> QuantizedWeight:
    values = torch.randint(-128, 128, (outputs, inputs), generator=torch.Generator().manual_seed(2), dtype=torch.int8)
    factors = scales(-(-inputs // group_size), outputs, inputs, dtype).float() / 16
    return ScaledWeight(values, factors, group_size)


def floats(outputs: int, inputs: int, group_size: int, dtype: torch.dtype = torch.half) -> QuantizedWeight:
    """Groups of 32 inputs whatever is asked for; powers of two of which float16 holds all, or not."""
    exponents = torch.randint(112, 124, (outputs, -(-inputs // 32)))
    if dtype != torch.half:
        exponents[0] = 90
    return Fp4Weight.pack(torch.randint(16, (outputs, inputs)).to(torch.uint8), exponents.to(torch.uint8))


def nvfp4(outputs: int, inputs: int, group_size: int, dtype: torch.dtype = torch.half) -> QuantizedWeight:
    """Groups of 16 inputs whatever is asked for; products of scales and factors that float16 holds, or not."""
    factors = torch.full((outputs,), 2.0**-9) if dtype == torch.half else numbers(outputs).abs() / 256
    bits = torch.randint(8, 72, (outputs, -(-inputs // 16))).to(torch.uint8)
    values = torch.randint(16, (outputs, inputs)).to(torch.uint8)
    return Fp4Weight.pack_nvfp4(values, bits.view(torch.float8_e4m3fn), factors)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(("dtype", "instructions"), KINDS)
@pytest.mark.parametrize(("outputs", "inputs", "group_size"), SHAPES)
@pytest.mark.parametrize("make", [zeros, minima, symmetric, floats, nvfp4, eight_bits])
def test_products_are_those_of_the_weight_it_stands_for(
    make, outputs, inputs, group_size, dtype, instructions, threads, request
):
    """Bit for bit: the same sums of the same weights."""
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(threads)
    weight, bias = make(outputs, inputs, group_size), numbers(outputs, seed=3)
    if dtype == torch.bfloat16 and inputs % 16:
        assert not can_take_grouped(weight, dtype)
        return
    product = GroupedProduct(weight, bias, dtype, instructions)
    dequantized = weight.dequantized(dtype)
    plain = (Float32Product if instructions is InstructionSet.AVX2 else PackedProduct)(dequantized, bias)
    for rows in (*range(14), 200, 700):
        x = numbers(rows, inputs + 4, seed=4)[:, 2:-2].to(dtype)
        result = product(x)
        assert torch.equal(result, plain(x)), rows
        assert_close(result, (x.double() @ dequantized.double().t() + bias).to(dtype))


@pytest.mark.parametrize(("dtype", "instructions"), KINDS)
@pytest.mark.parametrize("make", [zeros, minima, symmetric, floats, nvfp4, eight_bits])
def test_scales_that_float16_does_not_hold(make, dtype, instructions):
    weight, x = make(40, 96, 32, torch.float32), numbers(5, 96).to(dtype)
    product = GroupedProduct(weight, None, dtype, instructions)
    assert_close(product(x), (x.double() @ weight.dequantized(dtype).double().t()).to(dtype))


@pytest.mark.parametrize(("dtype", "instructions"), KINDS)
def test_inputs_in_another_order(dtype, instructions):
    order = torch.randperm(96)
    weight = four_bits(24, 96, 32, torch.half, torch.ones_like, order)
    for rows in (1, 9):
        x = numbers(rows, 96).to(dtype)
        product = GroupedProduct(weight, None, dtype, instructions)
        assert_close(product(x), (x.double() @ weight.dequantized(dtype).double().t()).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_linear_keeps_its_bits(dtype):
    class Stored:
        shape = (64, 256)

        def __init__(self, dtype: torch.dtype) -> None:
            self.dtype = dtype

        def read(self) -> QuantizedWeight:
            return zeros(64, 256, 128)

    if not supports_grouped(dtype, torch.device("cpu")):
        pytest.skip("another product is the faster on this processor")
    linear = Linear(Stored(dtype))
    linear.prepack()
    product = linear._product
    assert isinstance(product, GroupedProduct)
    kept = (product._weight, *product._factors)
    assert sum(each.nbytes for each in kept) == 64 * 256 // 2 + 2 * 2 * 64 * 2


def test_what_it_does_not_take():
    assert supports_grouped(torch.float32, torch.device("cpu"))
    assert not can_take_grouped(ScaledWeight(torch.zeros(4, 12, dtype=torch.int8), torch.ones(1, 4), 12), torch.float32)
    fp8 = ScaledWeight(torch.zeros(4, 16, dtype=torch.float8_e4m3fn), torch.ones(1, 4), 16)
    assert not can_take_grouped(fp8, torch.float32)
    assert not can_take_grouped(symmetric(4, 16, 16), torch.float16)
    assert supports_grouped(torch.bfloat16, torch.device("cpu")) == (instruction_set() is InstructionSet.AVX512_BF16)
    assert not supports_grouped(torch.float32, torch.device("cuda"))
