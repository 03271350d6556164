"""Mamba-2: the references against transformers' own, and the torch path against the reference."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridRMSNormGated,
    mamba2_chunk_scan,
    mamba2_selective_state_update,
)

from headrace.kernels.mamba2 import grouped_gated_rms_norm, selective_scan
from headrace.kernels.mamba2.chunked import selective_scan_chunked
from headrace.kernels.mamba2.reference import (
    grouped_gated_rms_norm_reference,
    selective_scan_reference,
    split_mixed,
)

from .mamba2_cases import SHAPES, hard_scan_case, in_two_parts, scan_case, zero_scan_case
from .state_cases import LENGTHS, assert_states
from .tolerances import DTYPES, assert_close

pytestmark = pytest.mark.usefixtures("_nan_filled_outputs")

CPU = torch.device("cpu")


@pytest.mark.parametrize("dt_limits", [(0.0, float("inf")), (0.3, 1.0)], ids=["free", "limited"])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_scan_is_that_of_transformers(shape, dt_limits):
    _, num_heads, state_dim, head_dim = SHAPES[shape]
    case = replace(scan_case((1, 9), SHAPES[shape], torch.float32, CPU), dt_limits=dt_limits)
    inputs, into, out_of = split_mixed(case.mixed, num_heads, state_dim, head_dim)
    arguments, decay = case.arguments, -case.decay_scale.exp()
    actual = selective_scan_reference(**arguments)
    for start, length, read, write in case.slots.spans:
        x, dt, b, c = (each[None, start : start + length] for each in (inputs, case.dt, into, out_of))
        expected, state = mamba2_chunk_scan(
            *(x, dt, decay, b, c, 4, case.skip, case.dt_bias),
            initial_states=case.states[read].mT[None],
            dt_softplus=True,
            dt_limit=dt_limits,
            return_final_states=True,
        )
        assert_close(actual[start : start + length], expected[0])
        assert_close(arguments["states"][write], state[0].mT)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_token_is_that_of_transformers(shape):
    """Which has no limits there."""
    _, num_heads, state_dim, head_dim = SHAPES[shape]
    case = scan_case((1,), SHAPES[shape], torch.float32, CPU)
    inputs, into, out_of = split_mixed(case.mixed, num_heads, state_dim, head_dim)
    decay = -case.decay_scale.exp()[:, None, None].expand(-1, head_dim, state_dim)
    dt, bias, skip = (each[..., None].expand(*each.shape, head_dim) for each in (case.dt, case.dt_bias, case.skip))
    state = case.states[0].mT[None].clone()
    expected = mamba2_selective_state_update(state, inputs, dt, decay, into, out_of, skip, bias, dt_softplus=True)
    arguments = case.arguments
    assert_close(selective_scan_reference(**arguments), expected)
    assert_close(arguments["states"][case.slots.write[0]], state[0].mT)


@pytest.mark.parametrize("num_groups", [1, 3])
def test_the_norm_is_that_of_transformers(num_groups):
    norm = GraniteMoeHybridRMSNormGated(24, 24 // num_groups, eps=1e-5)
    torch.nn.init.normal_(norm.weight, mean=1.0)
    x, gate = torch.randn(5, 24) * 3, torch.randn(5, 27)[:, :-3]
    assert_close(grouped_gated_rms_norm_reference(x, gate, norm.weight, 1e-5, num_groups), norm(x, gate))
    assert_close(grouped_gated_rms_norm(x, gate, norm.weight, 1e-5, num_groups), norm(x, gate))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_scan_by_chunks(lengths, shape, dtype):
    case = scan_case(LENGTHS[lengths], SHAPES[shape], dtype, CPU)
    given, expected = case.arguments, case.arguments
    output = selective_scan_chunked(**given)
    assert output.is_contiguous()
    assert_close(output, selective_scan_reference(**expected))
    assert_states(given["states"], expected["states"], case.states, case.slots, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["forgetful", "keeping", "limited"])
def test_hard_chunks(kind, dtype):
    case = hard_scan_case(kind, dtype, CPU)
    given, expected = case.arguments, case.arguments
    assert_close(selective_scan_chunked(**given), selective_scan_reference(**expected))
    assert_states(given["states"], expected["states"], case.states, case.slots, dtype)


@pytest.mark.parametrize("cut", [1, 2, 63, 64, 65])
def test_a_prompt_in_two_parts_is_a_whole_one(cut):
    whole = scan_case((130,), SHAPES["g2of4-odd"], torch.float32, CPU)
    expected = selective_scan(**vars(whole))
    output, state = in_two_parts(selective_scan, whole, cut)
    assert_close(output, expected)
    assert_close(state, whole.states[1])


SCAN_ERRORS = {
    "states-dtype": ({"states": torch.zeros(3, 2, 16, 16).half()}, r"states .*float16, must be"),
    "states-shape": ({"states": torch.zeros(3, 2, 16)}, r"states \(3, 2, 16\)"),
    "mixed-tokens": ({"mixed": torch.zeros(4, 64)}, r"mixed \(4, 64\) must be \[3 tokens, size\]"),
    "mixed-size": ({"mixed": torch.zeros(3, 65)}, r"mixed \(3, 65\) must have 16 inputs for each of 2 heads"),
    "mixed-groups": ({"mixed": torch.zeros(3, 32 + 3 * 32)}, r"mixed .* of which the heads are a multiple"),
    "no-groups": ({"mixed": torch.zeros(3, 32)}, r"mixed \(3, 32\) must have 16 inputs"),
    "dt": ({"dt": torch.zeros(3, 1)}, r"dt \(3, 1\), .* must be \[3 tokens, 2 heads\]"),
    "dt-dtype": ({"dt": torch.zeros(3, 2).half()}, r"dt \(3, 2\), torch.float16, must be"),
    "decay_scale": ({"decay_scale": torch.zeros(3)}, r"decay_scale \(3,\), .* must be \[2 heads\] float32"),
    "dt_bias": ({"dt_bias": torch.zeros(2).half()}, r"dt_bias \(2,\), torch.float16, must be"),
    "skip": ({"skip": torch.zeros(2, 1)}, r"skip \(2, 1\), torch.float32, must be"),
    "dt_limits": ({"dt_limits": (0.2, 0.1)}, r"dt_limits \(0.2, 0.1\) must be a least and a greatest step"),
}


@pytest.mark.parametrize(("changes", "message"), SCAN_ERRORS.values(), ids=SCAN_ERRORS)
def test_arguments_of_the_scan_that_do_not_fit_are_named(changes: dict[str, Any], message):
    case = zero_scan_case(CPU)
    with pytest.raises(ValueError, match=message):
        selective_scan(**vars(replace(case, **changes)))


NORM_ERRORS = {
    "x": ({"x": torch.zeros(3, 2, 16)}, r"x \(3, 2, 16\) must be \[num_tokens, size\], of 2 groups"),
    "groups": ({"num_groups": 3}, r"x \(3, 32\) must be \[num_tokens, size\], of 3 groups"),
    "gate": ({"gate": torch.zeros(3, 16)}, r"gate \(3, 16\), torch.float32, must be \[3, 32\]"),
    "weight": (
        {"weight": torch.zeros(32).half()},
        r"weight \(32,\), torch.float16, must be \[32\], of",
    ),
}


@pytest.mark.parametrize(("changes", "message"), NORM_ERRORS.values(), ids=NORM_ERRORS)
def test_arguments_of_a_norm_that_do_not_fit_are_named(changes: dict[str, Any], message):
    given: dict[str, Any] = {
        "x": torch.zeros(3, 32),
        "gate": torch.zeros(3, 32),
        "weight": torch.zeros(32),
        "num_groups": 2,
    }
    with pytest.raises(ValueError, match=message):
        grouped_gated_rms_norm(**given | changes, eps=1e-5)
