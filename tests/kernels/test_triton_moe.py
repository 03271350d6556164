"""A mixture's experts on the GPU against one token and one expert at a time."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

from headrace.kernels.activation import clamped_swiglu, gelu_tanh_and_mul, relu_squared, silu_and_mul
from headrace.kernels.linear import Fp4Weight, Int4Weight, QuantizedWeight, ScaledWeight
from headrace.kernels.linear.gates import Gate
from headrace.kernels.linear.quantized_reference import (
    int4_linear_reference,
    quantize_rows_reference,
    scaled_linear_reference,
)
from headrace.kernels.linear.triton import quantize_rows_triton, scaled_linear_triton
from headrace.kernels.moe import (
    ExpertGroups,
    StackedExperts,
    choose_experts,
    choose_experts_reference,
    mix_experts,
    mix_experts_reference,
    mix_stacked_experts,
)
from headrace.kernels.moe import triton as moe
from headrace.kernels.moe.stacked_experts import ClampedGate, ExpertGate, PlainMatrices, SquaredRelu, _stack
from headrace.kernels.moe.triton import ExpertTile, choose_experts_triton, expert_tile

from .tolerances import assert_close

NUM_EXPERTS = 5
ROUTINGS = {
    "all to one": [[3]] * 6,
    "all to the same two": [[4, 0]] * 40,
    "some experts without a token": [[1, 2], [2, 1], [1, 4], [4, 1]],
    "every token to every expert": [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]],
    "one token": [[2, 0, 3]],
    "whole tiles": [[0], [1]] * 16,
    "nobody": torch.empty(0, 2, dtype=torch.int64).tolist(),
}
ACTIVATIONS: dict[ExpertGate, Callable[[Tensor], Tensor]] = {
    Gate.SILU: silu_and_mul,
    Gate.GELU_TANH: gelu_tanh_and_mul,
    SquaredRelu(): relu_squared,
}


def num_first(inner: int, gate: ExpertGate) -> int:
    """Outputs of an expert's first product."""
    return inner if isinstance(gate, SquaredRelu) else 2 * inner


def stacked(
    size: int, inner: int, dtype: torch.dtype, device: torch.device, gate: ExpertGate = Gate.SILU
) -> StackedExperts:
    gate_up = torch.randn(NUM_EXPERTS, num_first(inner, gate), size, device=device) * size**-0.5
    down = torch.randn(NUM_EXPERTS, size, inner, device=device) * inner**-0.5
    return StackedExperts(PlainMatrices(gate_up.to(dtype)), PlainMatrices(down.to(dtype)), gate)


def apart(experts: StackedExperts) -> list[Callable[[Tensor], Tensor]]:
    """The same experts one by one, computed in float64."""
    activate = ACTIVATIONS[experts.gate]

    def expert(gate_up: Tensor, down: Tensor, x: Tensor) -> Tensor:
        activated = activate(linear(x.double().cpu(), gate_up.double().cpu()))
        return linear(activated, down.double().cpu())

    matrices = [each.values for each in (experts.gate_up, experts.down) if isinstance(each, PlainMatrices)]
    return [partial(expert, *each) for each in zip(*matrices, strict=True)]


def assert_mixed(x: Tensor, experts: StackedExperts, ids: Tensor) -> None:
    shares = torch.rand(ids.shape, device=x.device)
    mixed = mix_stacked_experts(x, experts, ids, shares)
    expected = mix_experts_reference(x.double().cpu(), apart(experts), ids.cpu(), shares.cpu()) if len(x) else x.cpu()
    assert mixed.dtype == x.dtype
    assert_close(mixed.cpu(), expected.to(x.dtype))


@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
@pytest.mark.parametrize(("size", "inner"), [(40, 24), (128, 64), (150, 130)])
@pytest.mark.usefixtures("_nan_filled_outputs")
def test_each_token_has_its_own_experts(size, inner, routing, triton_dtype, device):
    ids = torch.tensor(routing, dtype=torch.int64, device=device).view(len(routing), -1 if routing else 2)
    # A part of something wider.
    x = torch.randn(len(ids), size + 6, device=device).to(triton_dtype)[:, 3:-3]
    assert_mixed(x, stacked(size, inner, triton_dtype, device), ids)


@pytest.mark.parametrize("tile", [ExpertTile(64, 128, 4), ExpertTile(128, 256, 8)], ids=["some", "many"])
@pytest.mark.usefixtures("_nan_filled_outputs")
def test_tiles_of_many_rows(tile, triton_dtype, device, monkeypatch):
    monkeypatch.setattr(moe, "expert_tile", lambda *_: tile)
    ids = torch.randint(NUM_EXPERTS, (150, 2), device=device)
    ids[:, 1] = (ids[:, 0] + 1) % NUM_EXPERTS
    assert_mixed(torch.randn(150, 72, device=device).to(triton_dtype), stacked(72, 40, triton_dtype, device), ids)


@pytest.mark.parametrize("kind", [None, "fp4", "int4"])
@pytest.mark.usefixtures("_nan_filled_outputs")
def test_biases_and_gates_that_are_cut_off(kind, triton_dtype, device):
    """As gpt-oss has them: gates and ups in turns."""
    size, inner, gate = 96, 64, ClampedGate(limit=0.7, alpha=1.702)
    shapes = ((2 * inner, size), (size, inner))
    quantized = [[moved(KINDS[kind or "fp4"](*shape), device) for _ in range(NUM_EXPERTS)] for shape in shapes]
    dense = [[each.dequantized(triton_dtype) for each in layers] for layers in quantized]
    gate_up, down = map(_stack, quantized if kind else dense)
    biases = [torch.randn(NUM_EXPERTS, shape[0], device=device).to(triton_dtype) for shape in shapes]
    experts = StackedExperts(gate_up, down, gate, (biases[0], biases[1]))
    ids = torch.tensor([[0, 2], [2, 3], [4, 2]], device=device)
    x, shares = torch.randn(3, size, device=device).to(triton_dtype), torch.rand(3, 2, device=device)

    def expert(index: int, row: Tensor) -> Tensor:
        gates = linear(row.float(), dense[0][index].float(), biases[0][index].float()).to(triton_dtype)
        return linear(clamped_swiglu(gates, gate.limit, gate.alpha), dense[1][index], biases[1][index])

    mixed = mix_stacked_experts(x, experts, ids, shares)
    each = [partial(expert, index) for index in range(NUM_EXPERTS)]
    assert_close(mixed, mix_experts_reference(x, each, ids, shares))


@pytest.mark.parametrize("gate", [Gate.GELU_TANH, SquaredRelu()], ids=str)
def test_the_other_gates(gate, device):
    ids = torch.tensor([[0, 2], [2, 3]], device=device)
    assert_mixed(torch.randn(2, 40, device=device), stacked(40, 24, torch.float32, device, gate), ids)


# How an expert's matrix is quantised, of outputs and inputs.
KINDS: dict[str, Callable[[int, int], QuantizedWeight]] = {
    "int8": lambda outputs, inputs: of_bytes(outputs, inputs, torch.int8, inputs),
    "fp8": lambda outputs, inputs: of_bytes(outputs, inputs, torch.float8_e4m3fn, inputs),
    "fp8-groups": lambda outputs, inputs: of_bytes(outputs, inputs, torch.float8_e4m3fn, 128),
    "int8-blocks": lambda outputs, inputs: of_blocks(outputs, inputs, torch.int8),
    "fp8-blocks": lambda outputs, inputs: of_blocks(outputs, inputs, torch.float8_e4m3fn),
    "int4": lambda outputs, inputs: of_nibbles(outputs, inputs, 32),
    "int4-groups-of-a-tile": lambda outputs, inputs: of_nibbles(outputs, inputs, 64),
    "fp4": lambda outputs, inputs: of_floats(outputs, inputs),
    "nvfp4": lambda outputs, inputs: of_nvfp4(outputs, inputs),
    "int4-minima": lambda outputs, inputs: of_nibbles(outputs, inputs, 32, has_minima=True),
}


def of_bytes(outputs: int, inputs: int, dtype: torch.dtype, group_size: int) -> ScaledWeight:
    values = torch.randint(-100, 100, (outputs, inputs)).float().to(dtype)
    return ScaledWeight(values, torch.rand(-(-inputs // group_size), outputs) / 50 / inputs**0.5, group_size)


def of_blocks(outputs: int, inputs: int, dtype: torch.dtype) -> ScaledWeight:
    weight = of_bytes(outputs, inputs, dtype, 128)
    spread = weight.scales[:, torch.arange(outputs) // 128 * 128]
    return replace(weight, scales=spread).with_known_blocks()


def of_nibbles(outputs: int, inputs: int, group_size: int, has_minima: bool = False) -> Int4Weight:
    shape, values = (-(-inputs // group_size), outputs), torch.randint(16, (outputs, inputs)).to(torch.uint8)
    scales = torch.rand(shape).half() / 4 / inputs**0.5
    zeros = scales * 7.5 if has_minima else torch.randint(5, 11, shape).to(torch.uint8)
    return Int4Weight.pack(values, scales, zeros, group_size)


def of_floats(outputs: int, inputs: int) -> Fp4Weight:
    values = torch.randint(16, (outputs, inputs)).to(torch.uint8)
    return Fp4Weight.pack(values, torch.randint(118, 123, (outputs, -(-inputs // 32))).to(torch.uint8))


def of_nvfp4(outputs: int, inputs: int) -> Fp4Weight:
    values = torch.randint(16, (outputs, inputs)).to(torch.uint8)
    scales = (torch.rand(outputs, -(-inputs // 16)) + 0.5).to(torch.float8_e4m3fn)
    return Fp4Weight.pack_nvfp4(values, scales, (torch.rand(outputs) + 0.5) / 4 / inputs**0.5)


def moved(weight: QuantizedWeight, device: torch.device) -> QuantizedWeight:
    scales = weight.scales.to(device)
    if isinstance(weight, ScaledWeight):
        return replace(weight, values=weight.values.to(device), scales=scales)
    if isinstance(weight, Fp4Weight):
        factors = None if weight.factors is None else weight.factors.to(device)
        return replace(weight, packed=weight.packed.to(device), scales=scales, factors=factors)
    return replace(weight, packed=weight.packed.to(device), scales=scales, zeros=weight.zeros.to(device))


def product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    if not isinstance(weight, ScaledWeight):
        return int4_linear_reference(x, weight)
    if weight.values.dtype == torch.int8:
        rows = quantize_rows_reference(x, torch.int8, weight.group_size)
        return scaled_linear_reference(*rows, weight, None, x.dtype)
    # Of what is in between, the last bit decides which of two 8-bit floats it becomes: these are far apart.
    return scaled_linear_triton(*quantize_rows_triton(x, weight.values.dtype, weight.group_size), weight, None, x.dtype)


# The other gates once each way that they come in: by themselves, and with the rows in bytes.
@pytest.mark.parametrize(
    ("kind", "gate", "num_tokens"),
    [
        *((kind, Gate.SILU, num_tokens) for kind in KINDS for num_tokens in (3, 80)),
        *((kind, gate, 3) for kind in ("int8", "int4") for gate in (Gate.GELU_TANH, SquaredRelu())),
    ],
)
@pytest.mark.usefixtures("_nan_filled_outputs")
def test_quantised_experts_give_what_each_gives_alone(kind, gate, num_tokens, triton_dtype, device, monkeypatch):
    """Sizes that are no whole tiles; of the many tokens nearly all go to two experts, in tiles of many rows."""
    if num_tokens > 3:
        monkeypatch.setattr(moe, "_int4_tile", lambda *_: ExpertTile(64, 128, 4))
    size, inner = 136, 72
    shapes = ((num_first(inner, gate), size), (size, inner))
    gate_up, down = ([moved(KINDS[kind](*shape), device) for _ in range(NUM_EXPERTS)] for shape in shapes)
    experts = StackedExperts(_stack(gate_up), _stack(down), gate)
    assert getattr(experts.gate_up, "has_blocks", False) == kind.endswith("blocks")
    ids = torch.tensor([[3, 0], [4, 3], [3, 1], *[[2, 3]] * 77], device=device)[:num_tokens]
    shares = torch.rand(ids.shape, device=device)
    x = torch.randn(num_tokens, size, device=device).to(triton_dtype)

    def expert(index: int, row: Tensor) -> Tensor:
        return product(ACTIVATIONS[gate](product(row, gate_up[index])), down[index])

    mixed = mix_stacked_experts(x, experts, ids, shares)
    each = [partial(expert, index) for index in range(NUM_EXPERTS)]
    assert_close(mixed, mix_experts(x, each, ids, shares))


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("num_tokens", [1, 7, 64, 700])
def test_every_pair_is_in_one_tile(num_tokens, rows, device):
    for seed in range(4):
        torch.manual_seed(seed)
        # Favourites among them: some experts have nothing.
        ids = (torch.rand(num_tokens, 3, device=device) ** (1 + 3 * seed) * NUM_EXPERTS).long()
        routed = moe._Sorted.of(ids, NUM_EXPERTS, rows)
        pairs, tiles = routed.pairs, routed.tiles
        assert pairs.tolist() == ids.flatten().argsort(stable=True).tolist()
        chosen = ids.flatten().tolist()
        seen: list[int] = []
        for expert, first, count in tiles.tolist():
            assert 0 <= expert < NUM_EXPERTS
            assert 0 <= count <= rows
            seen += range(first, first + count)
            assert all(chosen[pair] == expert for pair in pairs[first : first + count].tolist())
        assert seen == list(range(len(chosen)))


def test_what_is_not_finite_stays_with_its_tokens(device):
    experts = stacked(40, 24, torch.float32, device)
    assert isinstance(experts.down, PlainMatrices)
    experts.down.values[3] = torch.inf
    ids = torch.tensor([[0, 1], [3, 0], [1, 2]], device=device)
    x = torch.randn(3, 40, device=device)
    mixed = mix_stacked_experts(x, experts, ids, torch.ones(3, 2, device=device))
    assert mixed.isfinite().all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(3, 1), (8, 8), (60, 4), (128, 8)])
@pytest.mark.usefixtures("_nan_filled_outputs")
def test_the_likeliest_experts_are_chosen(num_experts, num_chosen, normalise, triton_dtype, device):
    # No two alike, whose order would be anybody's.
    logits = torch.stack([torch.randperm(num_experts) for _ in range(20)]).to(device).to(triton_dtype) / 8
    wide = torch.cat([logits, logits], 1)[:, num_experts:]
    ids, shares = choose_experts_triton(wide, num_chosen, normalise)
    expected_ids, expected_shares = choose_experts(logits.cpu(), num_chosen, normalise)
    assert torch.equal(ids.cpu(), expected_ids)
    assert_close(shares.cpu(), expected_shares)


@pytest.mark.parametrize("are_sigmoids", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize(("num_experts", "num_chosen"), [(5, 2), (128, 8)])
@pytest.mark.usefixtures("_nan_filled_outputs")
def test_scores_are_chosen_with_their_correction_and_weigh_without_it(
    num_experts, num_chosen, normalise, are_sigmoids, device
):
    logits, correction = torch.randn(20, num_experts, device=device), torch.randn(num_experts, device=device)
    scoring = (num_chosen, normalise, correction, 2.5, are_sigmoids)
    ids, shares = choose_experts_triton(logits, *scoring)
    expected_ids, expected_shares = choose_experts_reference(logits, *scoring)
    assert torch.equal(ids, expected_ids)
    assert_close(shares, expected_shares)
    assert not torch.equal(ids, choose_experts_reference(logits, num_chosen, normalise)[0])


@pytest.mark.parametrize("is_corrected", [False, True])
@pytest.mark.parametrize(
    ("num_experts", "groups"), [(6, ExpertGroups(3, 1)), (160, ExpertGroups(8, 3)), (256, ExpertGroups(8, 4))]
)
@pytest.mark.usefixtures("_nan_filled_outputs")
def test_experts_of_the_best_groups_are_chosen(num_experts, groups, is_corrected, device):
    logits, num_chosen = torch.randn(20, num_experts, device=device), min(6, num_experts // 3)
    correction = torch.randn(num_experts, device=device) if is_corrected else None
    scoring = (num_chosen, is_corrected, correction, 2.5, True)
    ids, shares = choose_experts_triton(logits, *scoring, groups)
    expected_ids, expected_shares = choose_experts_reference(logits, *scoring, groups)
    assert torch.equal(ids, expected_ids)
    assert_close(shares, expected_shares)
    assert not torch.equal(ids, choose_experts_reference(logits, *scoring)[0])


@pytest.mark.parametrize("groups", [ExpertGroups(), ExpertGroups(2, 1)])
def test_logits_that_are_no_numbers_name_experts_that_there_are(groups, device):
    logits = torch.full((3, 6), torch.nan, device=device)
    logits[1] = -torch.inf
    logits[2] = torch.inf
    ids, _ = choose_experts_triton(logits, 2, normalise=True, groups=groups)
    assert ((ids >= 0) & (ids < 6)).all()


def test_tiles_suit_the_experts_shares_and_the_gpu():
    a100, hopper = 163 * 1024, 227 * 1024
    assert expert_tile(8, 128, torch.bfloat16, hopper).rows == 16
    assert expert_tile(256 * 8, 128, torch.bfloat16, hopper).rows == 16
    assert expert_tile(1024 * 8, 128, torch.bfloat16, hopper).rows == 64
    assert expert_tile(8192 * 8, 128, torch.bfloat16, hopper) == ExpertTile(128, 256, 8)
    assert expert_tile(8192 * 8, 128, torch.bfloat16, a100) == ExpertTile(128, 128, 8)
    assert expert_tile(8192 * 8, 128, torch.float32, hopper).rows == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(2, 41)}, r"experts.gate_up.values \(5, 48, 40\) must have the shape \[5, 48, 41\]"),
        ({"x": torch.zeros(2, 40, dtype=torch.float16)}, "experts.gate_up.values .* is float32, and must be float16"),
        ({"ids": torch.zeros(3, 2, dtype=torch.int64)}, r"ids \(3, 2\) must have the shape \[2, any\]"),
        ({"ids": torch.zeros(2, 2, dtype=torch.int32)}, "ids .* is int32, and must be int64"),
        ({"shares": torch.zeros(2, 3)}, r"shares \(2, 3\) must have the shape \[2, 2\]"),
    ],
)
def test_what_does_not_fit_is_named(changes, message, device):
    experts = stacked(40, 24, torch.float32, device)
    fitting = {"x": torch.zeros(2, 40), "ids": torch.zeros(2, 2, dtype=torch.int64), "shares": torch.zeros(2, 2)}
    arguments = {name: tensor.to(device) for name, tensor in (fitting | changes).items()}
    with pytest.raises(ValueError, match=message):
        mix_stacked_experts(arguments["x"], experts, arguments["ids"], arguments["shares"])


def test_a_correction_that_does_not_fit_is_named(device):
    with pytest.raises(ValueError, match=r"correction \(4,\) must have the shape \[5\]"):
        choose_experts_triton(torch.zeros(2, 5, device=device), 2, True, torch.zeros(4, device=device))


@pytest.mark.parametrize("groups", [ExpertGroups(2, 1), ExpertGroups(5, 6), ExpertGroups(5, 0)])
def test_groups_that_do_not_fit_are_named(groups, device):
    with pytest.raises(ValueError, match=rf"groups ExpertGroups\(number={groups.number}, .* must divide the 5 experts"):
        choose_experts_triton(torch.zeros(2, 5, device=device), 1, True, groups=groups)


def test_more_experts_than_there_are_cannot_be_chosen(device):
    with pytest.raises(ValueError, match=r"num_chosen 6 for router_logits \(2, 5\) must be 1 to 5"):
        choose_experts_triton(torch.zeros(2, 5, device=device), 6, normalise=True)
