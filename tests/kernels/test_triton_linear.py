"""Products with quantised weights on the GPU against the obvious torch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

from headrace.kernels import device as gpus
from headrace.kernels.activation import gelu_tanh_and_mul, silu_and_mul
from headrace.kernels.activation.triton import gelu_tanh_and_mul_triton, silu_and_mul_triton
from headrace.kernels.linear import (
    AdaptedRows,
    Addition,
    Fp4Weight,
    Int4Weight,
    ScaledWeight,
    quantized,
    unpacked,
)
from headrace.kernels.linear import triton as triton_linear
from headrace.kernels.linear.adapted import AdaptedProduct
from headrace.kernels.linear.gates import Gate
from headrace.kernels.linear.plain import plain_product
from headrace.kernels.linear.quantized import Int4Product, ScaledProduct, quantized_product
from headrace.kernels.linear.quantized_reference import (
    int4_linear_reference,
    quantize_rows_reference,
    scaled_linear_reference,
)
from headrace.kernels.linear.triton import (
    ScaledTile,
    int4_linear_triton,
    int4_options,
    int4_tile,
    quantize_gated_triton,
    quantize_rows_triton,
    scaled_linear_triton,
    scaled_tile,
    unpack_int4_triton,
)
from headrace.kernels.linear.unpacked import int4_linear_unpacked, min_unpacked_rows, unpacked_bytes

from .tolerances import FP8_TOLERANCE, TOLERANCES, assert_close

# What the interpreter says of rows of zeros, and of what is not a number.
pytestmark = [
    pytest.mark.usefixtures("_nan_filled_outputs"),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]
FP8 = torch.float8_e4m3fn
# Bytes of shared memory that a program may have.
ADA, A100, HOPPER = (kib * 1024 for kib in (99, 163, 227))
BYTES = pytest.mark.parametrize("byte_dtype", [torch.int8, FP8], ids=["int8", "fp8"])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def int4_weight(outputs: int, inputs: int, group_size: int, device: torch.device) -> Int4Weight:
    """Random values, scales of such a size that products are near one, and zeros up to sixteen."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    groups = -(-inputs // group_size)
    values = torch.randint(0, 16, (outputs, inputs), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(groups, outputs, generator=generator) + 0.5) * 0.15 * inputs**-0.5
    zeros = torch.randint(0, 17, (groups, outputs), generator=generator, dtype=torch.uint8)
    return Int4Weight.pack(values.to(device), scales.to(device), zeros.to(device), group_size)


def scaled_weight(
    outputs: int, inputs: int, group_size: int, byte_dtype: torch.dtype, device: torch.device
) -> ScaledWeight:
    values, scales = quantize_rows_reference(normal(outputs, inputs, seed=1) * inputs**-0.5, byte_dtype, group_size)
    return ScaledWeight(values.to(device), scales.t().contiguous().to(device), group_size)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group_size", "splits"),
    [
        (1, 72, 96, 32, 1),
        (3, 130, 200, 64, 2),
        (17, 40, 320, 128, 5),
        (64, 65, 128, 128, 1),
        (1, 8, 72, 72, 1),
        (3, 24, 160, 160, 3),
        (130, 33, 64, 32, None),
        (150, 130, 256, 128, 2),
        (2, 16, 600, 32, None),
        (0, 16, 64, 64, None),
    ],
)
def test_int4(rows, outputs, inputs, group_size, splits, triton_dtype, device):
    """On part of a wider tensor, with a bias for every other shape."""
    weight = int4_weight(outputs, inputs, group_size, device)
    x = normal(rows, inputs + 5).to(device, triton_dtype)[:, :inputs]
    bias = normal(outputs, seed=2).to(device, triton_dtype) if rows % 2 else None
    actual = int4_linear_triton(x, weight, bias, splits)
    assert_close(actual, int4_linear_reference(x, weight, bias))
    assert torch.equal(actual, int4_linear_triton(x, weight, bias, splits))


@pytest.mark.parametrize(
    ("rows", "inputs", "group_size", "splits"), [(1, 96, 32, 1), (17, 320, 64, 5), (3, 200, 32, None)]
)
def test_int4_with_minima(rows, inputs, group_size, splits, triton_dtype, device):
    """Where a scale is zero a minimum still counts."""
    weight = int4_weight(40, inputs, group_size, device)
    weight.scales[0, :5] = 0
    weight = replace(weight, zeros=(weight.zeros * weight.scales.mean()).half())
    x = normal(rows, inputs).to(device, triton_dtype)
    assert_close(int4_linear_triton(x, weight, None, splits), int4_linear_reference(x, weight))
    values, group = weight.unpacked(), torch.arange(inputs, device=device) // group_size
    expected = values * weight.scales.t()[:, group] - weight.zeros.float().t()[:, group]
    torch.testing.assert_close(weight.dequantized(torch.float32), expected)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group_size"),
    [(129, 130, 200, 64), (3, 24, 160, 160), (7, 600, 96, 32), (0, 16, 64, 64)],
)
@pytest.mark.parametrize("parts", ["whole", "parts"])
def test_int4_of_many_rows(parts, rows, outputs, inputs, group_size, triton_dtype, monkeypatch, device):
    """Bit for bit what torch makes of the dequantised weight, whole or some outputs at a time."""
    weight = int4_weight(outputs, inputs, group_size, device)
    if parts == "parts":
        monkeypatch.setattr(unpacked, "MAX_BYTES", 256 * inputs * triton_dtype.itemsize)
    x = normal(rows, inputs + 5).to(device, triton_dtype)[:, :inputs]
    bias = normal(outputs, seed=2).to(device, triton_dtype) if rows % 2 else None
    plain = weight.dequantized(triton_dtype)
    assert_close(int4_linear_unpacked(x, weight, bias), torch.nn.functional.linear(x, plain, bias))
    first = min(outputs, 48)
    assert torch.equal(unpack_int4_triton(weight, range(outputs), triton_dtype).t(), plain)
    assert torch.equal(unpack_int4_triton(weight, range(first, outputs), triton_dtype).t(), plain[first:])
    largest = min(outputs, 256) if parts == "parts" else outputs
    assert unpacked_bytes(weight, triton_dtype) == largest * inputs * triton_dtype.itemsize


def test_int4_with_minima_and_floats_in_four_bits_are_unpacked(triton_dtype, device):
    weight = int4_weight(40, 200, 32, device)
    minima = replace(weight, zeros=(weight.zeros * weight.scales.mean()).half())
    unpacked_minima = unpack_int4_triton(minima, range(40), triton_dtype).t()
    assert_close(unpacked_minima, minima.dequantized(triton_dtype))
    exponents = torch.randint(118, 130, (40, 7), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    floats = Fp4Weight.pack(weight.unpacked().cpu(), exponents)
    floats = replace(floats, packed=floats.packed.to(device), scales=floats.scales.to(device))
    for each in (floats, nvfp4_weight(40, 208, device)):
        assert torch.equal(unpack_int4_triton(each, range(40), triton_dtype).t(), each.dequantized(triton_dtype))


def nvfp4_weight(outputs: int, inputs: int, device: torch.device) -> Fp4Weight:
    """Every scale of E4M3 but those that are no numbers, the negative ones too, if there are enough groups."""
    generator = torch.Generator().manual_seed(inputs)
    values = torch.randint(16, (outputs, inputs), generator=generator).to(torch.uint8)
    scales = torch.tensor([each for each in range(256) if each % 128 != 127]).to(torch.uint8)
    scales = scales[torch.arange(outputs * (inputs // 16)) % len(scales)].view(outputs, -1)
    factors = (torch.rand(outputs, generator=generator) + 0.5) * 0.003 * inputs**-0.5
    return Fp4Weight.pack_nvfp4(values.to(device), scales.view(FP8).to(device), factors.to(device))


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "splits"), [(1, 72, 96, 1), (17, 40, 336, 3), (70, 65, 80, None), (3, 24, 16, None)]
)
def test_nvfp4(rows, outputs, inputs, splits, triton_dtype, device):
    weight, x = nvfp4_weight(outputs, inputs, device), normal(rows, inputs).to(device, triton_dtype)
    bias = normal(outputs, seed=2).to(device, triton_dtype) if rows % 2 else None
    assert_close(int4_linear_triton(x, weight, bias, splits), int4_linear_reference(x, weight, bias))


def test_nvfp4_is_what_its_bits_say(device):
    weight, sizes = nvfp4_weight(24, 80, device), (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    values, factors = weight.unpacked(), weight.zeros
    dequantized = weight.dequantized(torch.float64)
    for output, place in ((0, 0), (3, 79), (11, 15), (11, 16), (23, 63)):
        value, scale = int(values[output, place]), int(weight.scales[place // 16, output])
        exponent, fraction = scale >> 3 & 15, scale & 7
        size = (1 + fraction / 8) * 2.0 ** (exponent - 7) if exponent else fraction / 8 * 2.0**-6
        signs = (-1) ** (value >> 3) * (-1) ** (scale >> 7)
        expected = signs * sizes[value & 7] * size * float(factors[output])
        assert float(dequantized[output, place]) == pytest.approx(expected, rel=1e-6)
    turned = weight.with_outputs(torch.arange(23, -1, -1, device=device))
    assert torch.equal(turned.dequantized(torch.float64), dequantized.flip(0))


def test_a_weight_of_four_bits_is_unpacked_for_many_rows_alone(monkeypatch, device):
    """And says what that takes: rows and outputs are others'."""
    weight = int4_weight(40, 96, 32, device)
    product, dtype = Int4Product(weight, None), torch.float32
    few, many = normal(128, 96).to(device), normal(129, 96).to(device)
    assert (product.scratch_bytes(len(few), dtype), product.scratch_bytes(len(many), dtype)) == (0, 40 * 96 * 4)
    adapted = AdaptedProduct(product, AdaptedRows(), [Addition(0, normal(2, 96), normal(2, 40))])
    assert adapted.scratch_bytes(len(many), dtype) == 40 * 96 * 4
    expected = many @ weight.dequantized(dtype).t()
    assert_close(product(few), expected[: len(few)])
    monkeypatch.setattr(triton_linear, "int4_linear_kernel", None)
    assert_close(product(many), expected)


def test_hopper_unpacks_in_four_bits_for_more_rows(monkeypatch, device):
    """But not for float32, nor NVFP4, which it would unpack once more for each tile."""
    cpu, dtype = torch.device("cpu"), torch.float16
    weight, nvfp4 = int4_weight(40, 96, 32, cpu), nvfp4_weight(40, 96, cpu)
    mxfp4 = Fp4Weight.pack(weight.unpacked(), torch.full((40, 3), 120, dtype=torch.uint8))
    assert [min_unpacked_rows(each, dtype) for each in (weight, mxfp4, nvfp4)] == [129] * 3
    monkeypatch.setattr(gpus, "_INTERPRETED_CAPABILITY", (9, 0))
    assert [min_unpacked_rows(each, dtype) for each in (weight, mxfp4, nvfp4)] == [257, 257, 129]
    product = Int4Product(weight, None)
    assert [product.scratch_bytes(257, dtype), product.scratch_bytes(256, dtype)] == [40 * 96 * 2, 0]
    assert [product.scratch_bytes(129, torch.float32), product.scratch_bytes(128, torch.float32)] == [40 * 96 * 4, 0]
    if gpus.is_hopper(device):
        monkeypatch.setattr(triton_linear, "unpack_int4_kernel", None)
    weight, x = int4_weight(40, 96, 32, device), normal(256, 96).to(device, dtype)
    assert_close(Int4Product(weight, None)(x), int4_linear_reference(x, weight))


@pytest.mark.parametrize(("inputs", "group_size"), [(64, 32), (72, 72), (200, 64)])
def test_int4_unpacks_to_what_was_packed(inputs, group_size):
    generator = torch.Generator().manual_seed(inputs)
    values = torch.randint(0, 16, (24, inputs), generator=generator, dtype=torch.uint8)
    groups = -(-inputs // group_size)
    scales, zeros = torch.rand(groups, 24, generator=generator), torch.randint(0, 17, (groups, 24), dtype=torch.uint8)
    order = torch.randperm(inputs, generator=generator)
    weight = Int4Weight.pack(values, scales, zeros, group_size, order)
    assert torch.equal(weight.unpacked(), values)
    dequantized = weight.dequantized(torch.float32)
    for output, place in ((0, 0), (3, inputs - 1), (23, inputs // 2)):
        group = place // group_size
        expected = (float(values[output, place]) - float(zeros[group, output])) * float(scales[group, output])
        assert float(dequantized[output, order[place]]) == pytest.approx(expected)


@BYTES
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "group_size", "splits"),
    [
        (1, 72, 96, 96, None),
        (3, 130, 200, 200, 2),
        (17, 40, 320, 320, 3),
        (64, 65, 128, 128, 1),
        (200, 129, 40, 40, None),
        (70, 520, 40, 40, None),
        (2, 16, 1200, 1200, None),
        (3, 48, 256, 128, 2),
        (17, 33, 300, 128, 1),
        (0, 16, 64, 64, None),
    ],
)
def test_scaled(rows, outputs, inputs, group_size, splits, byte_dtype, triton_dtype, device):
    weight = scaled_weight(outputs, inputs, group_size, byte_dtype, device)
    values, scales = quantize_rows_reference(normal(rows, inputs).to(device), byte_dtype, group_size)
    bias = normal(outputs, seed=2).to(device, triton_dtype) if rows % 2 else None
    actual = scaled_linear_triton(values, scales, weight, bias, triton_dtype, splits)
    at_least = FP8_TOLERANCE if byte_dtype == FP8 and device.type == "cuda" else 0.0
    assert_close(actual, scaled_linear_reference(values, scales, weight, bias, triton_dtype), at_least)
    assert torch.equal(actual, scaled_linear_triton(values, scales, weight, bias, triton_dtype, splits))


@BYTES
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "splits"), [(3, 256, 256, 2), (70, 300, 400, 1), (1, 130, 1200, None)]
)
def test_scales_of_blocks(rows, outputs, inputs, splits, byte_dtype, triton_dtype, device):
    """128 outputs and 128 inputs have one, the last of either fewer."""
    blocks = torch.rand(-(-inputs // 128), -(-outputs // 128), generator=torch.Generator().manual_seed(0)) + 0.5
    spread = blocks.repeat_interleave(128, 1)[:, :outputs].contiguous().to(device) * inputs**-0.5
    values = torch.sign(normal(outputs, inputs, seed=1)).to(byte_dtype).to(device)
    weight = ScaledWeight(values, spread, 128).with_known_blocks()
    assert weight.has_blocks
    x, x_scales = quantize_rows_reference(torch.sign(normal(rows, inputs)).to(device), byte_dtype, 128)
    expected = scaled_linear_reference(x, x_scales, weight, None, triton_dtype)
    for tile in (None, ScaledTile(64, 64, 4, 2), ScaledTile(16, 256, 8, 1)):
        assert_close(scaled_linear_triton(x, x_scales, weight, None, triton_dtype, splits, tile), expected)
    product = quantized.ScaledProduct(weight, None)
    assert_close(product(torch.sign(normal(rows, inputs)).to(device, triton_dtype)), expected)


def test_blocks_are_known_from_the_scales(device):
    """And no longer where outputs have another order."""
    weight = scaled_weight(300, 256, 128, torch.int8, device)
    assert not weight.with_known_blocks().has_blocks
    rows = torch.tensor([0] * 128 + [130] * 128 + [260] * 44, device=device)
    blocked = replace(weight, scales=weight.scales[:, rows].contiguous()).with_known_blocks()
    assert blocked.has_blocks
    assert not blocked.with_outputs(rows).has_blocks
    last = blocked.scales.clone()
    last[1, 299] *= 2
    assert not replace(weight, scales=last).with_known_blocks().has_blocks
    whole = scaled_weight(300, 256, 256, torch.int8, device)
    assert not whole.with_known_blocks().has_blocks


@pytest.mark.parametrize(
    ("rows", "outputs", "is_grouped", "tile"),
    [
        (1, 4096, False, (64, 128)),
        (64, 28672, True, (64, 128)),
        (256, 4096, False, (128, 128)),
        (256, 28672, False, (128, 256)),
        (8192, 4096, False, (128, 256)),
        (8192, 4096, True, (128, 128)),
    ],
)
def test_tiles_are_wide_where_every_processor_has_one(rows, outputs, is_grouped, tile):
    found = scaled_tile(rows, outputs, is_grouped, processors=132, shared=HOPPER)
    assert (found.rows, found.outputs) == tile


@pytest.mark.parametrize(
    ("rows", "outputs", "dtype", "is_of_one_group", "tile"),
    [
        (1, 4096, torch.bfloat16, True, (16, 128)),
        (1, 4096, torch.bfloat16, False, (16, 64)),
        (17, 4096, torch.bfloat16, True, (32, 64)),
        (64, 4096, torch.bfloat16, True, (64, 64)),
        # More than three for each processor.
        (64, 28672, torch.bfloat16, True, (64, 128)),
        (128, 28672, torch.float16, False, (128, 128)),
        (8192, 4096, torch.bfloat16, True, (128, 128)),
        (1, 4096, torch.float32, True, (16, 64)),
        (256, 4096, torch.float32, True, (32, 64)),
    ],
)
def test_tiles_in_four_bits(rows, outputs, dtype, is_of_one_group, tile):
    found = int4_tile(rows, outputs, dtype, is_of_one_group, processors=132, on_hopper=False)
    assert (found.rows, found.outputs) == tile
    on_hopper = int4_tile(rows, outputs, dtype, is_of_one_group, processors=132, on_hopper=True)
    assert on_hopper == found or (dtype is not torch.float32 and rows > 128 and on_hopper.rows == 256)


def test_what_products_in_four_bits_are_compiled_for(monkeypatch):
    """The weight is the first factor where tensor cores are waited for, or there are many rows; sums are for few."""
    weight, dtype = int4_weight(64, 128, 128, torch.device("cpu")), torch.bfloat16

    def first_at(dtype: torch.dtype, *rows: int) -> list[bool]:
        return [int4_options(weight, 1, dtype, each, 64, is_fp4=False)["WEIGHT_FIRST"] for each in rows]

    for capability, is_first in (((8, 0), True), ((9, 0), False), ((10, 0), False), ((12, 0), True)):
        monkeypatch.setattr(gpus, "_INTERPRETED_CAPABILITY", capability)
        assert first_at(dtype, 16, 64, 128) == [is_first, is_first, True]
        assert first_at(torch.float32, 16, 128) == [False, False]
    of_sums = [int4_options(weight, 1, dtype, rows, 64, is_fp4=False)["SCALES_SUMS"] for rows in (16, 64, 128)]
    assert of_sums == [True, True, False]


@pytest.mark.parametrize(("shared", "tile", "stages"), [(ADA, (128, 128), 3), (A100, (128, 256), 3)])
def test_a_tile_fits_into_a_smaller_shared_memory(shared, tile, stages):
    found = scaled_tile(8192, 4096, False, processors=100, shared=shared)
    assert (found.rows, found.outputs, found.num_stages(shared)) == (*tile, stages)


@pytest.mark.parametrize(
    ("rows", "inputs", "group_size"), [(1, 3, 3), (5, 200, 200), (3, 300, 128), (64, 512, 128), (0, 8, 8)]
)
def test_rows_in_int8(rows, inputs, group_size, triton_dtype, device):
    """Bit for bit, ties and a row of zeros among them."""
    x = (normal(rows, inputs + 1) * 3).to(device, triton_dtype)[:, :inputs]
    x[:, 0], x[:1, : inputs // 2] = 127, 2.5
    if rows > 1:
        x[1] = 0
    values, scales = quantize_rows_triton(x, torch.int8, group_size)
    expected, expected_scales = quantize_rows_reference(x, torch.int8, group_size)
    assert torch.equal(values, expected)
    assert torch.equal(scales, expected_scales)


@BYTES
@pytest.mark.parametrize(("inputs", "group_size"), [(200, 200), (300, 128)])
@pytest.mark.parametrize("activate", [silu_and_mul, gelu_tanh_and_mul])
def test_a_product_of_what_is_gated_is_that_of_the_gated_rows(activate, inputs, group_size, byte_dtype, device):
    """Bit for bit: also where an activation is one that no kernel has."""
    product = ScaledProduct(scaled_weight(24, inputs, group_size, byte_dtype, device), None)
    gate_up = normal(3, 2 * inputs + 4).to(device)[:, : 2 * inputs]
    triton_activate = {silu_and_mul: silu_and_mul_triton, gelu_tanh_and_mul: gelu_tanh_and_mul_triton}[activate]
    expected = product(triton_activate(gate_up))
    assert torch.equal(product.gated(activate, gate_up), expected)
    assert torch.equal(product.gated(lambda x: triton_activate(x), gate_up), expected)


def test_gates_that_do_not_fit_are_named(device):
    with pytest.raises(ValueError, match=r"gate_up \(2, 7\) must have an even number of columns"):
        quantize_gated_triton(normal(2, 7).to(device), torch.int8, 7, Gate.SILU)


@pytest.mark.parametrize("group_size", [300, 128])
def test_rows_in_fp8(group_size, triton_dtype, device):
    """Of numbers that fp8 has: the interpreter rounds others wrongly, a GPU as torch does."""
    numbers = torch.arange(0x08, 0x7F, dtype=torch.uint8).view(FP8).float()
    x = numbers[torch.randint(0, len(numbers), (3, 300), generator=torch.Generator().manual_seed(0))]
    x[:, ::2] *= -1
    # Every group's largest is fp8's own.
    x[:, ::128] = 448
    x = (x * torch.tensor([[0.25], [1.0], [2.0]])).to(device, triton_dtype)
    values, scales = quantize_rows_triton(x, FP8, group_size)
    expected, expected_scales = quantize_rows_reference(x, FP8, group_size)
    assert torch.equal(values.float(), expected.float())
    assert torch.equal(scales, expected_scales)
    if device.type == "cuda":
        rough = normal(40, 300).to(device, triton_dtype)
        assert torch.equal(
            quantize_rows_triton(rough, FP8, group_size)[0].float(),
            quantize_rows_reference(rough, FP8, group_size)[0].float(),
        )


@BYTES
@pytest.mark.parametrize("value", [torch.nan, torch.inf], ids=str)
def test_what_is_not_finite_stays_so_and_in_its_row(value, byte_dtype, device):
    weight = scaled_weight(40, 96, 96, byte_dtype, device)
    # Magnitudes that the interpreter rounds rightly.
    x = torch.sign(normal(3, 96)).to(device)
    x[1, 95] = value
    values, scales = quantize_rows_triton(x, byte_dtype, 96)
    product = scaled_linear_triton(values, scales, weight, None, torch.float32)
    assert product.isfinite().all(1).tolist() == [True, False, True]
    assert not product[1].isfinite().any()


def test_a_product_puts_its_inputs_in_order(device):
    """The GPU's product, and the one where there is none, of a weight whose inputs were sorted by group."""
    order = torch.randperm(96, generator=torch.Generator().manual_seed(3)).to(device)
    weight = replace(int4_weight(40, 96, 32, device), order=order)
    x, bias = normal(5, 96).to(device), normal(40, seed=2).to(device)
    expected = torch.nn.functional.linear(x, weight.dequantized(torch.float32), bias)
    assert_close(Int4Product(weight, bias)(x), expected)
    assert_close(quantized_product(weight, bias, torch.float32)(x), expected)


def test_a_product_quantises_its_rows(triton_dtype, device):
    weight, x = scaled_weight(40, 96, 96, torch.int8, device), normal(5, 96).to(device, triton_dtype)
    expected = scaled_linear_reference(*quantize_rows_reference(x, torch.int8, 96), weight, None, triton_dtype)
    assert_close(ScaledProduct(weight, None)(x), expected)


def test_a_gpu_multiplies_what_it_has_a_kernel_for(monkeypatch, device):
    """Groups of other sizes are dequantised, and on older GPUs 8-bit floats."""
    monkeypatch.setattr(quantized, "runs_triton", lambda tensor: True)
    monkeypatch.setattr(quantized, "supports_grouped", lambda dtype, where: False)
    plain = type(plain_product(torch.zeros(16, 256, device=device), None))
    for is_new, fp8_product in ((True, ScaledProduct), (False, plain)):
        monkeypatch.setattr(quantized, "supports_fp8", lambda where, is_new=is_new: is_new)
        for byte_dtype, group_size, expected in (
            (torch.int8, 256, ScaledProduct),
            (torch.int8, 128, ScaledProduct),
            (torch.int8, 64, plain),
            (FP8, 128, fp8_product),
        ):
            weight = scaled_weight(16, 256, group_size, byte_dtype, device)
            assert isinstance(quantized_product(weight, None, torch.float32), expected)
    assert isinstance(quantized_product(int4_weight(24, 64, 32, device), None, torch.float32), Int4Product)


@BYTES
def test_without_a_kernel_bytes_are_dequantised(monkeypatch, byte_dtype):
    """As on a CPU: in groups for either, and as one group for fp8."""
    monkeypatch.setattr(quantized, "supports_grouped", lambda dtype, where: False)
    weight, x = scaled_weight(40, 256, 128, byte_dtype, torch.device("cpu")), normal(5, 256)
    expected = x @ weight.dequantized(torch.float32).t()
    assert_close(quantized_product(weight, None, torch.float32)(x), expected)


INT4_ERRORS = {
    "x shape": (lambda x, w: (x[:, :60], w), r"x \(2, 60\) must have the shape \[any, 64\]"),
    "x dtype": (lambda x, w: (x.double(), w), r"x \(2, 64\) is float64, and must be float32 or"),
    "x stride": (lambda x, w: (x.t().contiguous().t(), w), r"x \(2, 64\) must be contiguous in its last dimension"),
    "packed shape": (lambda x, w: (x, replace(w, packed=w.packed[:8])), r"weight\.packed \(8, 24\) must have"),
    "packed dtype": (lambda x, w: (x, replace(w, packed=w.packed.int())), r"weight\.packed \(32, 24\) is int32"),
    "scales": (
        lambda x, w: (x, replace(w, scales=w.scales[:1])),
        r"weight\.scales \(1, 24\) must have the shape \[2, 24",
    ),
    "zeros": (
        lambda x, w: (x, replace(w, zeros=w.zeros.int())),
        r"weight\.zeros \(2, 24\) is int32, and must be uint8",
    ),
    "device": (lambda x, w: (x, replace(w, zeros=w.zeros.to("meta"))), r"weight\.zeros \(2, 24\) is on meta"),
    "bias": (lambda x, w: (x, w, x[0, :5]), r"bias \(5,\) must have the shape \[24\]"),
    "group size": (lambda x, w: (x, replace(w, group_size=24)), r"group_size 24 must be a multiple of 32, or 64"),
}


@pytest.mark.parametrize(("arguments", "message"), INT4_ERRORS.values(), ids=INT4_ERRORS)
def test_int4_arguments_that_do_not_fit_are_named(arguments, message, device):
    x, weight = normal(2, 64).to(device), int4_weight(24, 64, 32, device)
    with pytest.raises(ValueError, match=message):
        int4_linear_triton(*arguments(x, weight))


SCALED_ERRORS = {
    "values shape": (lambda v, s, w: (v[:, :200].contiguous(), s, w, None), r"values \(2, 200\) must have the shape"),
    "values dtype": (lambda v, s, w: (v.float(), s, w, None), r"values \(2, 256\) is float32, and must be int8"),
    "weight stride": (
        lambda v, s, w: (v, s, replace(w, values=w.values.t().contiguous().t()), None),
        r"weight\.values \(16, 256\) must be contiguous",
    ),
    "weight dtype": (lambda v, s, w: (v, s, replace(w, values=w.values.int()), None), r"weight\.values .* is int32"),
    "group size": (
        lambda v, s, w: (v, s, replace(w, group_size=64), None),
        r"weight\.group_size 64 must be 128, or 256",
    ),
    "weight scales": (lambda v, s, w: (v, s, replace(w, scales=w.scales[:1]), None), r"weight\.scales \(1, 16\) must"),
    "scales": (lambda v, s, w: (v, s[:, :1].contiguous(), w, None), r"scales \(2, 1\) must have the shape \[2, 2\]"),
    "bias": (lambda v, s, w: (v, s, w, s[0]), r"bias \(2,\) must have the shape \[16\]"),
}


@pytest.mark.parametrize(("arguments", "message"), SCALED_ERRORS.values(), ids=SCALED_ERRORS)
def test_scaled_arguments_that_do_not_fit_are_named(arguments, message, device):
    weight = scaled_weight(16, 256, 128, torch.int8, device)
    values, scales = quantize_rows_reference(normal(2, 256).to(device), torch.int8, 128)
    left, left_scales, right, bias = arguments(values, scales, weight)
    with pytest.raises(ValueError, match=message):
        scaled_linear_triton(left, left_scales, right, bias, torch.float32)


def test_dtypes_that_nothing_is_quantised_or_multiplied_to_are_named(device):
    weight = scaled_weight(16, 128, 128, torch.int8, device)
    values, scales = quantize_rows_reference(normal(2, 128).to(device), torch.int8, 128)
    with pytest.raises(ValueError, match="dtype must be int8 or float8_e4m3fn, not int16"):
        quantize_rows_triton(normal(2, 8).to(device), torch.int16, 8)
    with pytest.raises(ValueError, match="group_size 0 for x"):
        quantize_rows_triton(normal(2, 8).to(device), torch.int8, 0)
    with pytest.raises(ValueError, match="dtype must be float32, float16 or bfloat16, not float64"):
        scaled_linear_triton(values, scales, weight, None, torch.float64)


def test_tolerances_could_not_hide_a_lost_group(device):
    """A product is a few times the tolerance away from one with another group's scales."""
    weight = int4_weight(24, 64, 32, device)
    x, swapped = normal(3, 64).to(device), replace(weight, scales=weight.scales.flip(0))
    difference = int4_linear_reference(x, weight) - int4_linear_reference(x, swapped)
    assert difference.abs().mean() > 10 * TOLERANCES[torch.float16]
