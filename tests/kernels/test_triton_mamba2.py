"""Mamba-2 on the GPU against the obvious torch."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

from headrace.kernels.mamba2.reference import grouped_gated_rms_norm_reference, selective_scan_reference
from headrace.kernels.mamba2.triton import grouped_gated_rms_norm_triton, selective_scan_triton
from headrace.kernels.recurrent_states import StateSlots

from .mamba2_cases import SHAPES, ScanCase, hard_scan_case, in_two_parts, scan_case, zero_scan_case
from .state_cases import LENGTHS, assert_states, load_two_of_four, on
from .tolerances import assert_close

pytestmark = pytest.mark.usefixtures("_nan_filled_outputs")

# The interpreter takes its time: every length and every shape, but not all with all.
CASES = [
    *((lengths, "g2of4-odd") for lengths in ("one", "few", "padded")),
    *((lengths, "g1of4") for lengths in ("decodes", "padded")),
    *((lengths, "g1of1") for lengths in ("mixed", "long", "whole")),
]


def check(case: ScanCase) -> None:
    given, expected = case.arguments, case.arguments
    assert_close(selective_scan_triton(**given), selective_scan_reference(**expected))
    assert_states(given["states"], expected["states"], case.states, case.slots, case.mixed.dtype)


@pytest.mark.parametrize(("lengths", "shape"), CASES)
def test_the_scan(lengths, shape, triton_dtype, device):
    check(scan_case(LENGTHS[lengths], SHAPES[shape], triton_dtype, device))


@pytest.mark.parametrize("kind", ["forgetful", "keeping", "limited"])
def test_hard_chunks(kind, triton_dtype, device):
    check(hard_scan_case(kind, triton_dtype, device))


@pytest.mark.parametrize(("state_dim", "head_dim"), [(128, 64), (256, 128)])
def test_large_states(state_dim, head_dim, triton_dtype, device):
    check(scan_case((1, 20), (1, 1, state_dim, head_dim), triton_dtype, device))


@pytest.mark.parametrize("cut", [1, 64, 70])
def test_a_prompt_in_two_parts_is_a_whole_one(cut, triton_dtype, device):
    whole = scan_case((90,), SHAPES["g1of1"], triton_dtype, device)
    expected = selective_scan_triton(**vars(whole))
    output, state = in_two_parts(selective_scan_triton, whole, cut)
    assert_close(output, expected)
    assert_close(state.to(triton_dtype), whole.states[1].to(triton_dtype))


def test_another_step_in_the_same_table(triton_dtype, device):
    """As a graph replays decodes: what it has too many is padding, whose rows of the output nobody writes."""
    case = scan_case((1,) * 4, SHAPES["g1of4"], triton_dtype, device)
    of_two = load_two_of_four(case.slots)
    rows = {"mixed": case.mixed[:2], "dt": case.dt[:2], "slots": of_two}
    given, expected = case.arguments, case.arguments | rows
    output = selective_scan_triton(**given)
    assert_close(output[:2], selective_scan_reference(**expected))
    assert bool(output[2:].isnan().all())
    assert_states(given["states"], expected["states"], case.states, of_two, triton_dtype)


@pytest.mark.parametrize("shape", [(1, 1, 16), (5, 3, 24), (3, 8, 128), (2, 1, 1040), (0, 2, 16)], ids=str)
def test_norm(shape, triton_dtype, device):
    num_tokens, num_groups, group_size = shape
    size = num_groups * group_size
    x, weight = (torch.randn(each).to(device, triton_dtype) * 3 for each in ((num_tokens, size), (size,)))
    gate = torch.randn(num_tokens, size + 3).to(device, triton_dtype)[:, :-3]
    given = x, gate, weight, 1e-5, num_groups
    assert_close(grouped_gated_rms_norm_triton(*given), grouped_gated_rms_norm_reference(*given))


def test_nothing(device):
    case = scan_case((0,), (1, 1, 16, 16), torch.float32, device)
    assert selective_scan_triton(**vars(case)).shape == (0, 1, 16)


SCAN_ERRORS = {
    "mixed": ({"mixed": torch.zeros(3, 128)[:, ::2]}, r"mixed \(3, 64\) must be contiguous in its last dimension"),
    "mixed-tokens": ({"mixed": torch.zeros(4, 64)}, r"mixed \(4, 64\) must have the shape \[3, any\]"),
    "mixed-size": ({"mixed": torch.zeros(3, 65)}, r"mixed \(3, 65\) must have 16 inputs for each of 2 heads"),
    "mixed-dtype": ({"mixed": torch.zeros(3, 64).double()}, r"mixed \(3, 64\) is float64"),
    "dt": ({"dt": torch.zeros(3, 1)}, r"dt \(3, 1\) must have the shape \[3, 2\]"),
    "dt-dtype": ({"dt": torch.zeros(3, 2).half()}, r"dt \(3, 2\) is float16, and must be float32"),
    "decay_scale": ({"decay_scale": torch.zeros(4)[::2]}, r"decay_scale \(2,\) must be contiguous"),
    "dt_bias": ({"dt_bias": torch.zeros(2, device="meta")}, r"dt_bias \(2,\) is on meta"),
    "skip": ({"skip": torch.zeros(3)}, r"skip \(3,\) must have the shape \[2\]"),
    "states": ({"states": torch.zeros(3, 2, 16, 16).half()}, r"states .* is float16, and must be float32"),
    "state_dim": ({"states": torch.zeros(3, 2, 8, 16)}, r"states .* state_dim of 8 .* 16 to 256"),
    "head_dim": ({"states": torch.zeros(1, 2, 16, 257)}, r"states .* head_dim of 257: both must be 16 to 256"),
    "dt_limits": ({"dt_limits": (0.2, 0.1)}, r"dt_limits \(0.2, 0.1\) must be a least and a greatest step"),
    "slots": ({"slots": StateSlots((3,), (0,), (1,), torch.device("meta"))}, "slots are on meta, and must be on"),
}


@pytest.mark.parametrize(("changes", "message"), SCAN_ERRORS.values(), ids=SCAN_ERRORS)
def test_arguments_of_the_scan_that_do_not_fit_are_named(changes: dict[str, Any], message, device):
    with pytest.raises(ValueError, match=message):
        selective_scan_triton(**vars(zero_scan_case(device)) | on(device, changes))


NORM_ERRORS = {
    "x": ({"x": torch.zeros(32, 3).T}, r"x \(3, 32\) must be contiguous"),
    "groups": ({"num_groups": 3}, r"x \(3, 32\) must be 3 groups of one size"),
    "gate": ({"gate": torch.zeros(3, 16)}, r"gate \(3, 16\) must have the shape \[3, 32\]"),
    "weight": ({"weight": torch.zeros(32).half()}, r"weight \(32,\) is float16, and must be float32"),
}


@pytest.mark.parametrize(("changes", "message"), NORM_ERRORS.values(), ids=NORM_ERRORS)
def test_arguments_of_a_norm_that_do_not_fit_are_named(changes: dict[str, Any], message, device):
    given: dict[str, Any] = {"x": torch.zeros(3, 32), "gate": torch.zeros(3, 32), "weight": torch.zeros(32)}
    with pytest.raises(ValueError, match=message):
        grouped_gated_rms_norm_triton(**on(device, given | {"num_groups": 2} | changes), eps=1e-5)
