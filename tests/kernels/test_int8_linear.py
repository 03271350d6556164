"""The compiled int8 product against exact sums, with every instruction set that the processor has."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.activation import gelu_tanh_and_mul, silu_and_mul
from headrace.kernels.linear import Linear, supports_int8
from headrace.kernels.linear.int8 import Int8Product
from headrace.kernels.linear.int8_reference import int8_linear_reference, quantize_rows
from headrace.kernels.native import InstructionSet, has_bfloat16, instruction_set, native_library

from .tolerances import DTYPES, assert_close

pytestmark = pytest.mark.skipif(native_library() is None, reason="needs the compiled kernels")

_SHAPES = [
    (1, 7, 5),
    (3, 33, 64),
    (16, 16, 128),
    (33, 100, 200),
    (65, 96, 72),
    (300, 1, 9),
    (17, 1000, 63),
    (2, 64, 896),
    (5, 40, 66),
    (300, 40, 1000),
]


@pytest.fixture(
    params=[InstructionSet.AVX2, InstructionSet.AVX512, InstructionSet.AVX512_BF16, InstructionSet.AMX],
    ids=["avx2", "vnni", "vnni-bfloat16", "amx"],
)
def instructions(request: pytest.FixtureRequest) -> InstructionSet:
    if request.param > instruction_set():
        pytest.skip("the processor has no such instructions")
    return request.param


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest, instructions: InstructionSet) -> torch.dtype:
    if request.param == torch.bfloat16 and instructions < InstructionSet.AVX512_BF16:
        pytest.skip("without arithmetic for bfloat16 rows are float32")
    return request.param


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def whole_numbers(rows: int, columns: int) -> Tensor:
    """Of all that int8 holds; the first of each row makes its scale 1."""
    generator = torch.Generator().manual_seed(rows)
    numbers = torch.randint(-127, 128, (rows, columns), generator=generator).float()
    numbers[:, 0] = 127
    return numbers


@pytest.mark.parametrize(("rows", "outputs", "inputs"), _SHAPES)
def test_sums_are_exact(rows, outputs, inputs, instructions):
    x, weight = whole_numbers(rows, inputs), whole_numbers(outputs, inputs)
    product = Int8Product(weight, instructions=instructions)(x)
    # Below 2^24: float32 holds every sum.
    assert torch.equal(product, (x.double() @ weight.double().t()).float())


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), _SHAPES)
def test_against_the_reference(rows, outputs, inputs, with_bias, dtype, instructions):
    weight, x = normal(outputs, inputs, dtype=dtype) * inputs**-0.5, normal(rows, inputs, dtype=dtype)
    bias = normal(outputs, dtype=dtype) if with_bias else None
    product = Int8Product(weight, bias, instructions)(x)
    assert_close(product, int8_linear_reference(x, *quantize_rows(weight), bias))


def test_many_threads_share_a_product(instructions):
    """More than there are processors, so that rows and columns are both cut, and rows are quantised by several, too."""
    weight, x = normal(200, 100), normal(170, 100)
    product = Int8Product(weight, instructions=instructions)
    alone = product(x)
    torch.set_num_threads(6)
    try:
        assert torch.equal(product(x), alone)
    finally:
        torch.set_num_threads(1)


def test_a_weight_that_is_int8_already(instructions):
    weight, scales = quantize_rows(normal(40, 70))
    expected = int8_linear_reference(normal(3, 70), weight // 2, scales * 2)
    assert_close(Int8Product(weight // 2, None, instructions, scales * 2)(normal(3, 70)), expected)


def test_no_rows():
    assert Int8Product(normal(8, 5))(normal(0, 5)).shape == (0, 8)


def test_rows_that_do_not_lie_next_to_each_other():
    wide, product = normal(5, 40), Int8Product(normal(24, 16))
    assert torch.equal(product(wide[:, 8:24]), product(wide[:, 8:24].contiguous()))


def test_rows_and_weights_of_zeros_give_the_bias(instructions):
    weight, bias, x = normal(20, 30), normal(20), normal(3, 30)
    x[1], weight[4] = 0, 0
    product = Int8Product(weight, bias, instructions)(x)
    assert torch.equal(product[1], bias)
    assert torch.equal(product[:, 4], bias[4].expand(3))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("rows", [1, 40])
def test_what_is_not_finite_stays_so_and_in_its_row(rows, dtype, value, instructions):
    weight, x = normal(20, 70, dtype=dtype), normal(rows, 70, dtype=dtype)
    product = Int8Product(weight, instructions=instructions)
    expected = product(x)
    x[rows // 2, 65] = value
    actual = product(x)
    assert not actual[rows // 2].isfinite().any()
    others = torch.arange(rows) != rows // 2
    assert torch.equal(actual[others], expected[others])


def test_the_smallest_numbers_do_not_overflow(instructions):
    x = torch.full((2, 8), 1e-44)
    assert torch.equal(Int8Product(torch.ones(4, 8), instructions=instructions)(x).abs() < 1e-40, torch.ones(2, 4) > 0)


@pytest.mark.parametrize("activate", [silu_and_mul, gelu_tanh_and_mul, lambda gate_up: gate_up[:, :72].relu()])
@pytest.mark.parametrize("rows", [0, 1, 40])
def test_of_gated_rows_the_same_bits_as_of_activated_ones(rows, activate, dtype, instructions):
    product = Int8Product(normal(33, 72, dtype=dtype), normal(33, dtype=dtype), instructions)
    gate_up = normal(rows, 150, dtype=dtype)[:, 3:147]
    assert torch.equal(product.gated(activate, gate_up), product(activate(gate_up)))
    assert torch.equal(product(gate_up[:, :72]), product(gate_up[:, :72].contiguous()))


def test_rounding_loses_little():
    weight, x = normal(256, 512) * 512**-0.5, normal(64, 512)
    error = Int8Product(weight)(x) - x @ weight.t()
    # Steps of 1/127 of a row's largest, some three deviations: about a percent in either factor.
    assert error.std() < 0.015


def test_a_linear_gives_its_weight_up_for_one_of_int8():
    linear, router = Linear(normal(16, 16)), Linear(normal(16, 16), quantizable=False)
    x = normal(3, 16)
    exact = x @ router.weight.t()
    for each in (linear, router):
        each.prepack(int8=True)
    with pytest.raises(AssertionError, match="packed"):
        _ = linear.weight
    assert (router(x) - exact).abs().max() < 1e-4 < (linear(x) - exact).abs().max()


def test_supported_are_the_dtypes_of_a_cpu():
    cpu = torch.device("cpu")
    assert supports_int8(torch.bfloat16, cpu) == has_bfloat16()
    assert supports_int8(torch.float32, cpu)
    assert not supports_int8(torch.float16, cpu)
    assert not supports_int8(torch.bfloat16, torch.device("cuda"))


def test_a_linear_of_gated_rows_whatever_its_weight():
    plain, rounded, gate_up = Linear(normal(16, 24)), Linear(normal(16, 24)), normal(3, 48)
    activated = silu_and_mul(gate_up)
    expected = activated @ plain.weight.t()
    plain.prepack()
    rounded.prepack(int8=True)
    assert_close(plain.gated(silu_and_mul, gate_up), expected)
    assert torch.equal(rounded.gated(silu_and_mul, gate_up), rounded(activated))
