"""Gated DeltaNet on the GPU against the obvious torch."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

from headrace.kernels import gated_delta
from headrace.kernels.gated_delta.reference import (
    gated_delta_rule_reference,
    gated_rms_norm_reference,
)
from headrace.kernels.gated_delta.triton import gated_delta_rule_triton, gated_rms_norm_triton
from headrace.kernels.recurrent_states import StateSlots

from .gated_delta_cases import (
    SHAPES,
    hard_rule_case,
    in_two_parts,
    rule_case,
    zero_rule_case,
)
from .state_cases import LENGTHS, assert_states, load_two_of_four, on
from .tolerances import assert_close

pytestmark = pytest.mark.usefixtures("_nan_filled_outputs")

# The interpreter takes its time: every length and every shape, but not all with all.
CASES = [
    *((lengths, "h2of4-odd") for lengths in ("one", "few", "padded")),
    *((lengths, "h1of4") for lengths in ("decodes", "padded")),
    *((lengths, "h1of1") for lengths in ("mixed", "long", "whole")),
]


@pytest.mark.parametrize(("lengths", "shape"), CASES)
def test_the_rule(lengths, shape, triton_dtype, device):
    case = rule_case(LENGTHS[lengths], SHAPES[shape], triton_dtype, device)
    given, expected = case.arguments, case.arguments
    assert_close(gated_delta_rule_triton(**given), gated_delta_rule_reference(**expected))
    assert_states(given["states"], expected["states"], case.states, case.slots, triton_dtype)


def test_a_gpu_is_told_all(monkeypatch, device):
    monkeypatch.setattr(gated_delta, "runs_triton", lambda _: True)
    case = rule_case((1,), SHAPES["h2of4-odd"], torch.float32, device)
    assert case.doubles_beta
    output = gated_delta.gated_delta_rule(**case.arguments)
    assert_close(output, gated_delta_rule_reference(**case.arguments))


@pytest.mark.parametrize("kind", ["alike", "forgetful"])
def test_hard_chunks(kind, triton_dtype, device):
    case = hard_rule_case(kind, triton_dtype, device)
    given, expected = case.arguments, case.arguments
    assert_close(gated_delta_rule_triton(**given), gated_delta_rule_reference(**expected))
    assert_states(given["states"], expected["states"], case.states, case.slots, triton_dtype)


@pytest.mark.parametrize("num_values", [128, 256])
def test_the_longest_keys(num_values, triton_dtype, device):
    case = rule_case((1, 20), (1, 1, num_values, num_values), triton_dtype, device)
    given, expected = case.arguments, case.arguments
    assert_close(gated_delta_rule_triton(**given), gated_delta_rule_reference(**expected))
    assert_states(given["states"], expected["states"], case.states, case.slots, triton_dtype)


@pytest.mark.parametrize("cut", [1, 64, 70])
def test_a_prompt_in_two_parts_is_a_whole_one(cut, triton_dtype, device):
    whole = rule_case((90,), SHAPES["h1of1"], triton_dtype, device)
    expected = gated_delta_rule_triton(**vars(whole))
    output, state = in_two_parts(gated_delta_rule_triton, whole, cut)
    assert_close(output, expected)
    assert_close(state.to(triton_dtype), whole.states[1].to(triton_dtype))


def test_another_step_in_the_same_table(triton_dtype, device):
    """As a graph replays decodes: what it has too many is padding, whose rows of the output nobody writes."""
    case = rule_case((1,) * 4, SHAPES["h1of4"], triton_dtype, device)
    of_two = load_two_of_four(case.slots)
    rows = {name: getattr(case, name)[:2] for name in ("mixed", "decay", "beta")}
    given, expected = case.arguments, case.arguments | rows | {"slots": of_two}
    output = gated_delta_rule_triton(**given)
    assert_close(output[:2], gated_delta_rule_reference(**expected))
    assert bool(output[2:].isnan().all())
    assert_states(given["states"], expected["states"], case.states, of_two, triton_dtype)


@pytest.mark.parametrize("shape", [(1, 1, 16), (5, 3, 24), (3, 4, 128), (0, 2, 16)], ids=str)
def test_gated_rms_norm(shape, triton_dtype, device):
    num_tokens, num_heads, size = shape
    x, weight = (torch.randn(each).to(device, triton_dtype) * 3 for each in (shape, shape[-1:]))
    gate = torch.randn(num_tokens, num_heads * size + 3).to(device, triton_dtype)[:, :-3]
    assert_close(gated_rms_norm_triton(x, gate, weight, 1e-5), gated_rms_norm_reference(x, gate, weight, 1e-5))


def test_nothing(device):
    rule = rule_case((0,), (1, 1, 16, 16), torch.float32, device)
    assert gated_delta_rule_triton(**vars(rule)).shape == (0, 1, 16)


RULE_ERRORS = {
    "mixed": ({"mixed": torch.zeros(3, 128)[:, ::2]}, r"mixed \(3, 64\) must be contiguous in its last dimension"),
    "mixed-tokens": ({"mixed": torch.zeros(4, 64)}, r"mixed \(4, 64\) must have the shape \[3, any\]"),
    "mixed-size": ({"mixed": torch.zeros(3, 65)}, r"mixed \(3, 65\) must have queries and keys of 16"),
    "mixed-dtype": ({"mixed": torch.zeros(3, 64).double()}, r"mixed \(3, 64\) is float64"),
    "decay": ({"decay": torch.zeros(3, 1)}, r"decay \(3, 1\) must have the shape \[3, 2\]"),
    "beta": ({"beta": torch.zeros(3, 2).half()}, r"beta \(3, 2\) is float16, and must be float32"),
    "decay_scale": ({"decay_scale": torch.zeros(4)[::2]}, r"decay_scale \(2,\) must be contiguous"),
    "decay_bias": ({"decay_bias": torch.zeros(2, device="meta")}, r"decay_bias \(2,\) is on meta"),
    "states": ({"states": torch.zeros(3, 2, 16, 16).half()}, r"states .* is float16, and must be float32"),
    "key_dim": ({"states": torch.zeros(3, 2, 8, 16)}, r"states .* key_dim of 8 .* 16 to 256"),
    "value_dim": ({"states": torch.zeros(1, 2, 16, 257)}, r"states .* value_dim of 257: both must be 16 to 256"),
    "slots": ({"slots": StateSlots((3,), (0,), (1,), torch.device("meta"))}, "slots are on meta, and must be on"),
}


@pytest.mark.parametrize(("changes", "message"), RULE_ERRORS.values(), ids=RULE_ERRORS)
def test_arguments_of_the_rule_that_do_not_fit_are_named(changes: dict[str, Any], message, device):
    with pytest.raises(ValueError, match=message):
        gated_delta_rule_triton(**vars(zero_rule_case(device)) | on(device, changes))


NORM_ERRORS = {
    "x": ({"x": torch.zeros(3, 16, 2).transpose(1, 2)}, r"x \(3, 2, 16\) must be contiguous"),
    "gate": ({"gate": torch.zeros(3, 16)}, r"gate \(3, 16\) must have the shape \[3, 32\]"),
    "weight": ({"weight": torch.zeros(16).half()}, r"weight \(16,\) is float16, and must be float32"),
}


@pytest.mark.parametrize(("changes", "message"), NORM_ERRORS.values(), ids=NORM_ERRORS)
def test_arguments_of_a_norm_that_do_not_fit_are_named(changes: dict[str, Tensor], message, device):
    given = {"x": torch.zeros(3, 2, 16), "gate": torch.zeros(3, 32), "weight": torch.zeros(16), **changes}
    with pytest.raises(ValueError, match=message):
        gated_rms_norm_triton(**on(device, given), eps=1e-5)
