"""The compiled product with weights of four and eight bits in groups, against that of the weights they stand for."""

from functools import partial

import pytest
import torch
from torch import Tensor

from headrace.kernels.linear import Int4Weight, Linear, QuantizedWeight, ScaledWeight
from headrace.kernels.linear.float32 import Float32Product
from headrace.kernels.linear.grouped import GroupedProduct, can_take_grouped, supports_grouped
from headrace.kernels.native import InstructionSet, instruction_set, native_library

from .tolerances import assert_close

pytestmark = [
    pytest.mark.usefixtures("_nan_filled_outputs"),
    pytest.mark.skipif(native_library() is None, reason="needs the compiled kernels"),
]

# Outputs, inputs and group size: tails of both, one group of all, groups that the last one is a part of.
SHAPES = [(72, 136, 32), (16, 64, 64), (1, 8, 8), (40, 168, 128), (33, 96, 96)]


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


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("rows", [*range(8), 13, 200, 700])
@pytest.mark.parametrize(("outputs", "inputs", "group_size"), SHAPES)
@pytest.mark.parametrize("make", [zeros, minima, symmetric, eight_bits])
def test_products_are_those_of_the_weight_it_stands_for(make, outputs, inputs, group_size, rows, threads, request):
    """Bit for bit: the same sums of the same weights."""
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(threads)
    weight = make(outputs, inputs, group_size)
    bias, x = numbers(outputs, seed=3), numbers(rows, inputs + 4, seed=4)[:, 2:-2]
    assert can_take_grouped(weight)
    product = GroupedProduct(weight, bias)(x)
    assert torch.equal(product, Float32Product(weight.dequantized(torch.float32), bias)(x))
    assert_close(product, (x.double() @ weight.dequantized(torch.float64).t() + bias).float())


@pytest.mark.parametrize("make", [zeros, minima, symmetric, eight_bits])
def test_scales_that_float16_does_not_hold(make):
    weight, x = make(40, 96, 32, torch.float32), numbers(5, 96)
    assert_close(GroupedProduct(weight, None)(x), (x.double() @ weight.dequantized(torch.float64).t()).float())


def test_inputs_in_another_order():
    order = torch.randperm(96)
    weight = four_bits(24, 96, 32, torch.half, torch.ones_like, order)
    for rows in (1, 9):
        x = numbers(rows, 96)
        assert_close(GroupedProduct(weight, None)(x), x @ weight.dequantized(torch.float32).t())


@pytest.mark.skipif(instruction_set() is not InstructionSet.AVX2, reason="for processors with AVX2 and no AVX-512")
def test_a_linear_keeps_its_bits():
    class Stored:
        shape, dtype = (64, 256), torch.float32

        def read(self) -> QuantizedWeight:
            return zeros(64, 256, 128)

    assert supports_grouped(torch.float32, torch.device("cpu"))
    linear = Linear(Stored())
    linear.prepack()
    product = linear._product
    assert isinstance(product, GroupedProduct)
    kept = (product._weight, *product._factors)
    assert sum(each.nbytes for each in kept) == 64 * 256 // 2 + 2 * 2 * 64 * 2


def test_what_it_does_not_take():
    assert not can_take_grouped(ScaledWeight(torch.zeros(4, 12, dtype=torch.int8), torch.ones(1, 4), 12))
    assert not can_take_grouped(ScaledWeight(torch.zeros(4, 16, dtype=torch.float8_e4m3fn), torch.ones(1, 4), 16))
    assert not supports_grouped(torch.bfloat16, torch.device("cpu"))
    assert not supports_grouped(torch.float32, torch.device("cuda"))
