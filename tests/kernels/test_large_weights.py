"""Addresses in weights of more than 2**31 numbers, and in what they are multiplied with.

See `test_large_tensors.py`.
"""

from dataclasses import replace

import numpy
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

from headrace.kernels.linear import Int4Weight, ScaledWeight
from headrace.kernels.linear.gates import Gate
from headrace.kernels.linear.triton import (
    ScaledTile,
    int4_linear_triton,
    quantize_gated_triton,
    quantize_rows_triton,
    scaled_linear_triton,
    unpack_int4_triton,
)
from headrace.kernels.linear.triton_kernels import sum_splits_kernel
from headrace.kernels.lora import AdapterMatrices, TokenTiles
from headrace.kernels.lora.triton import add_low_rank_triton
from headrace.kernels.moe.stacked_experts import ByteMatrices, Int4Matrices, PlainMatrices, StackedExperts
from headrace.kernels.moe.triton import mix_stacked_experts_triton
from headrace.kernels.moe.triton_kernels import experts_kernel

from .large_tensors import DTYPE, apart, at_the_end, huge, refuse_overflows, run_last_programs

pytestmark = [
    pytest.mark.skipif(
        "config.getoption('--device') != 'cpu' or 'HEADRACE_TESTS_CAPABILITY' in os.environ",
        reason="it is Triton's interpreter that sees what overflows",
    ),
    # Of products of what no program has written, as the last one is the only one.
    pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning"),
]
NUM_EXPERTS, SIZE, INNER = 256, 4096, 2304
# So that those of 28,672 numbers are more than 2**31.
MANY_ROWS = 80_000


@pytest.fixture(autouse=True)
def _checked_programs(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_overflows(monkeypatch)
    if "_all_programs" not in request.fixturenames:
        run_last_programs(monkeypatch)


@pytest.fixture
def _all_programs() -> None:
    """Where they are few."""


def numbers(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    """Whole ones, small enough for any type, and none like its neighbours."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.int32) % 13 - (0 if dtype == torch.uint8 else 6)).to(dtype).view(shape)


def test_a_vocabulary_in_bytes():
    weight = huge(262_208, 8192, dtype=torch.int8)
    weight[-64:] = numbers(64, 8192, dtype=torch.int8)
    scales = torch.full((1, len(weight)), 0.5)
    tile = ScaledTile(16, 64, num_warps=4, per_processor=2**20)
    x, x_scales = numbers(1, 8192, dtype=torch.int8), torch.ones(1, 1)
    got = scaled_linear_triton(x, x_scales, ScaledWeight(weight, scales, 8192), None, torch.float32, 1, tile)
    assert torch.equal(got[0, -64:], weight[-64:].float() @ x[0].float() / 2)


def test_a_vocabulary_in_four_bits():
    packed = huge(16_384, 262_144, dtype=torch.uint8)
    scales, zeros = huge(256, 262_144), huge(256, 262_144, dtype=torch.uint8)
    weight = Int4Weight(packed, scales, zeros, 128, 32_768)
    int4_linear_triton(numbers(1, 32_768), weight, num_splits=64)
    unpack_int4_triton(weight, range(262_080, 262_144), DTYPE)


def test_many_rows_of_bytes():
    x = at_the_end(numbers(28_672, dtype=torch.int8), MANY_ROWS)
    weight = ScaledWeight(numbers(64, 28_672, dtype=torch.int8), torch.ones(1, 64), 28_672)
    tile = ScaledTile(16, 64, num_warps=4, per_processor=2**20)
    got = scaled_linear_triton(x, torch.ones(MANY_ROWS, 1), weight, None, torch.float32, 1, tile)
    assert torch.equal(got[-1], weight.values.float() @ x[-1].float())


def test_many_rows_for_four_bits():
    packed, scales = numbers(14_336, 64, dtype=torch.uint8), torch.ones(224, 64, dtype=DTYPE)
    weight = Int4Weight(packed, scales, torch.ones(224, 64, dtype=torch.uint8), 128, 28_672)
    int4_linear_triton(huge(MANY_ROWS, 28_672), weight, num_splits=64)


def test_sums_of_splits():
    rows, size = MANY_ROWS, 28_672
    parts, output = huge(2, rows, size, dtype=torch.float32), huge(rows, size)
    parts[:, -1, -1] = 3
    sum_splits_kernel[(-(-rows * size // 1024),)](
        output, parts, parts, rows, size, HAS_BIAS=False, SPLITS=2, NUMBERS=1024, IS_EARLY=False
    )
    assert output[-1, -1] == 6


@pytest.mark.parametrize("is_gated", [False, True])
def test_quantised_rows(is_gated):
    x = at_the_end(torch.ones(2 * 28_672, dtype=DTYPE), MANY_ROWS)
    if is_gated:
        values, scales = quantize_gated_triton(x, torch.int8, 128, Gate.SILU)
    else:
        values, scales = quantize_rows_triton(x, torch.int8, 128)
    assert bool((values[-1, -128:] == 127).all())
    assert scales[-1, -1] > 0


def of_numbers(*shape: int) -> PlainMatrices:
    return PlainMatrices(huge(*shape))


def of_bytes(experts: int, outputs: int, inputs: int) -> ByteMatrices:
    scales = huge(experts, inputs // 128, outputs, dtype=torch.float32)
    return ByteMatrices(huge(experts, outputs, inputs, dtype=torch.int8), scales, 128)


def of_nibbles(experts: int, outputs: int, inputs: int) -> Int4Matrices:
    scales, zeros = (huge(experts, inputs // 128, outputs, dtype=dtype) for dtype in (DTYPE, torch.uint8))
    return Int4Matrices(huge(experts, inputs // 2, outputs, dtype=torch.uint8), scales, zeros, 128, inputs)


@pytest.mark.parametrize("stacked", [of_numbers, of_bytes, of_nibbles])
def test_experts(stacked):
    """The last of so many as the largest mixtures have."""
    matrices = stacked(NUM_EXPERTS, 2 * INNER, SIZE), stacked(NUM_EXPERTS, SIZE, INNER)
    x, ids = numbers(1, SIZE), torch.tensor([[NUM_EXPERTS - 1]])
    mix_stacked_experts_triton(x, StackedExperts(*matrices, Gate.SILU), ids, torch.ones(1, 1))


@pytest.mark.parametrize("is_first", [True, False])
def test_many_pairs_of_a_token_and_an_expert(is_first):
    """The last one among the sorted, and the last one: of a long step in a mixture where each token has one expert."""
    count, size = 700_000, 4096
    pairs, tiles = huge(count, dtype=torch.int32), torch.tensor([[0, count - 1, 1]], dtype=torch.int32)
    pairs[-1] = count - 1
    x, output = huge(count, size)[:, :64], huge(count, size)
    x[-1] = 1
    weight, sizes = numbers(1, size, 64), (size, 64, 1, size)
    shape = {"ROWS": 16, "OUTPUTS": size, "INPUTS": 64}
    options = {"HAS_BIAS": False, "IS_WHOLE": True, "PRECISION": "ieee", "IS_EARLY": False, **shape}
    experts_kernel[(1,)](output, x, weight, weight, pairs, tiles, *sizes, CHOSEN=1, IS_FIRST=is_first, **options)
    assert torch.equal(output[-1], weight[0].sum(1))


@pytest.mark.usefixtures("_all_programs")
def test_adapters():
    """The last of 160, of rank 16 where there is room for 256, over inputs as wide as models have them."""
    slots, rank, size, parts = 160, 256, 28_672, ((0, 64), (64, 64), (57_280, 64))
    few = AdapterMatrices.blank(1, rank, size, 57_344, parts, DTYPE, torch.device("cpu"))
    few.down[0, 2, :16], few.up[0, :16, -64:] = numbers(16, size) / 64, numbers(16, 64) / 64
    few.ranks[0, 2] = 16
    down, up, ranks = (at_the_end(each[0], slots) for each in (few.down, few.up, few.ranks))
    x = numbers(3, size) / 64

    def added(output: Tensor, x: Tensor, matrices: AdapterMatrices, slots: int) -> Tensor:
        add_low_rank_triton(output, x, matrices, TokenTiles.of(numpy.full(3, slots - 1), slots, x.device))
        return output[:, -64:]

    expected = added(torch.zeros(3, 57_344, dtype=DTYPE), x, few, 1)
    assert expected.any()
    many = replace(few, down=down, up=up, ranks=ranks)
    assert torch.equal(added(apart(torch.zeros(3, 57_344, dtype=DTYPE)), apart(x), many, slots), expected)
