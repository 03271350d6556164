"""Gated DeltaNet: the reference against transformers' own, and the torch path against the reference."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated, torch_recurrent_gated_delta_rule

from headrace.kernels.gated_delta import gated_delta_rule, gated_rms_norm
from headrace.kernels.gated_delta.chunked import gated_delta_rule_chunked
from headrace.kernels.gated_delta.reference import (
    gated_delta_rule_reference,
    gated_rms_norm_reference,
)

from .gated_delta_cases import (
    SHAPES,
    hard_rule_case,
    in_two_parts,
    rule_case,
    zero_rule_case,
)
from .state_cases import LENGTHS, assert_states
from .tolerances import DTYPES, assert_close

pytestmark = pytest.mark.usefixtures("_nan_filled_outputs")

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", SHAPES)
def test_the_rule_is_that_of_transformers(shape):
    num_key_heads, num_heads, key_dim, value_dim = SHAPES[shape]
    case = rule_case((1, 9), SHAPES[shape], torch.float32, CPU)
    sizes = [2 * num_key_heads * key_dim, num_heads * value_dim]
    queries_and_keys, values = case.mixed.split_with_sizes(sizes, dim=1)
    query, key = (
        each.unflatten(1, (-1, key_dim)).repeat_interleave(num_heads // num_key_heads, 1)
        for each in queries_and_keys.chunk(2, dim=1)
    )
    rates = -case.decay_scale.exp() * torch.nn.functional.softplus(case.decay + case.decay_bias)
    # As OLMo Hybrid's, where it is doubled.
    written = case.beta.sigmoid() * (1 + case.doubles_beta)
    given = query, key, values.unflatten(1, (-1, value_dim)), rates, written
    arguments = case.arguments
    actual = gated_delta_rule_reference(**arguments)
    assert_close(gated_delta_rule(**case.arguments), actual)
    for start, length, read, write in case.slots.spans:
        own = (each[None, start : start + length] for each in given)
        expected, state = torch_recurrent_gated_delta_rule(
            *own, initial_state=case.states[read][None], output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        assert_close(actual[start : start + length], expected[0])
        assert_close(arguments["states"][write], state[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_rms_norm_is_that_of_transformers(dtype):
    norm = Qwen3NextRMSNormGated(24, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight, mean=1.0)
    x, gate = torch.randn(5, 3, 24).to(dtype) * 3, torch.randn(5, 75).to(dtype)[:, :-3]
    assert_close(gated_rms_norm_reference(x, gate, norm.weight, 1e-5), norm(x, gate.unflatten(1, (3, 24))))
    assert torch.equal(gated_rms_norm(x, gate, norm.weight, 1e-5), norm(x, gate.unflatten(1, (3, 24))))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_rule_by_chunks(lengths, shape, dtype):
    case = rule_case(LENGTHS[lengths], SHAPES[shape], dtype, CPU)
    given, expected = case.arguments, case.arguments
    output = gated_delta_rule_chunked(**given)
    assert output.is_contiguous()
    assert_close(output, gated_delta_rule_reference(**expected))
    assert_states(given["states"], expected["states"], case.states, case.slots, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["alike", "forgetful"])
def test_hard_chunks(kind, dtype):
    case = hard_rule_case(kind, dtype, CPU)
    given, expected = case.arguments, case.arguments
    assert_close(gated_delta_rule_chunked(**given), gated_delta_rule_reference(**expected))
    assert_states(given["states"], expected["states"], case.states, case.slots, dtype)


@pytest.mark.parametrize("cut", [1, 2, 63, 64, 65])
def test_a_prompt_in_two_parts_is_a_whole_one(cut):
    whole = rule_case((130,), SHAPES["h2of4-odd"], torch.float32, CPU)
    expected = gated_delta_rule(**vars(whole))
    output, state = in_two_parts(gated_delta_rule, whole, cut)
    assert_close(output, expected)
    assert_close(state, whole.states[1])


RULE_ERRORS = {
    "states-dtype": ({"states": torch.zeros(3, 2, 16, 16).half()}, r"states .*float16, must be"),
    "states-shape": ({"states": torch.zeros(3, 2, 16)}, r"states \(3, 2, 16\)"),
    "mixed-tokens": ({"mixed": torch.zeros(4, 64)}, r"mixed \(4, 64\) must be \[3 tokens, size\]"),
    "mixed-size": ({"mixed": torch.zeros(3, 65)}, r"mixed \(3, 65\) must have queries and keys of 16"),
    "mixed-heads": ({"mixed": torch.zeros(3, 32 + 3 * 32)}, r"mixed .* a multiple of the key heads"),
    "no-keys": ({"mixed": torch.zeros(3, 32)}, r"mixed \(3, 32\) must have queries"),
    "decay": ({"decay": torch.zeros(3, 1)}, r"decay \(3, 1\), .* must be \[3 tokens, 2 heads\]"),
    "beta": ({"beta": torch.zeros(3, 2).half()}, r"beta \(3, 2\), torch.float16, must be"),
    "decay_scale": ({"decay_scale": torch.zeros(3)}, r"decay_scale \(3,\), .* must be \[2 heads\] float32"),
    "decay_bias": ({"decay_bias": torch.zeros(2).half()}, r"decay_bias \(2,\), torch.float16, must be"),
}


@pytest.mark.parametrize(("changes", "message"), RULE_ERRORS.values(), ids=RULE_ERRORS)
def test_arguments_of_the_rule_that_do_not_fit_are_named(changes: dict[str, Any], message):
    case = zero_rule_case(CPU)
    with pytest.raises(ValueError, match=message):
        gated_delta_rule(**vars(replace(case, **changes)))
