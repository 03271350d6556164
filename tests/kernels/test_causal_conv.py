"""Short convolutions: the reference against transformers' own, and the torch path against the reference."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers.models.bamba.modeling_bamba import causal_conv1d_fn, causal_conv1d_update

from headrace.kernels.causal_conv import causal_conv
from headrace.kernels.causal_conv.chunked import causal_conv_chunked
from headrace.kernels.causal_conv.reference import causal_conv_reference

from .causal_conv_cases import KINDS, conv_case, zero_conv_case
from .state_cases import LENGTHS, assert_states
from .tolerances import DTYPES, assert_close

pytestmark = pytest.mark.usefixtures("_nan_filled_outputs")

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_convolutions_are_those_of_transformers(kind):
    """Of a sequence's first tokens, and of one after them."""
    case = conv_case((9, 1), 20, 4, torch.float32, CPU, kind)
    arguments = case.arguments
    actual = causal_conv_reference(**arguments)
    activation = "silu" if case.silu else None
    expected = causal_conv1d_fn(case.x[None, :9].mT, case.weight, case.bias, activation)
    assert_close(actual[:9], expected[0].T)
    state = case.states[case.slots.read[1]].T[None].clone()
    expected = causal_conv1d_update(case.x[9, None, :, None], state, case.weight, case.bias, activation)
    assert_close(actual[9:], expected[0].T)
    assert torch.equal(arguments["states"][case.slots.write[1]], state[0].T)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_convolutions(lengths, width, kind, dtype):
    case = conv_case(LENGTHS[lengths], 19, width, dtype, CPU, kind)
    given, expected = case.arguments, case.arguments
    assert_close(causal_conv_chunked(**given), causal_conv_reference(**expected))
    assert_states(given["states"], expected["states"], case.states, case.slots, dtype)


CONV_ERRORS = {
    "x": ({"x": torch.zeros(2, 5)}, r"x \(2, 5\) must be \[3 tokens, num_channels\]"),
    "weight": ({"weight": torch.zeros(4, 4)}, r"weight \(4, 4\) must be \[5 channels, width\]"),
    "width": ({"weight": torch.zeros(5, 1)}, r"weight \(5, 1\) .* width of 2 or more"),
    "states": ({"states": torch.zeros(3, 4, 5)}, r"states \(3, 4, 5\) must be \[num_slots, 3, 5 channels\]"),
    "weight-dtype": ({"weight": torch.zeros(5, 4).half()}, r"weight is torch.float16, and x torch.float32"),
    "states-dtype": ({"states": torch.zeros(3, 3, 5).half()}, r"states is torch.float16, and x torch.float32"),
    "bias": ({"bias": torch.zeros(4)}, r"bias \(4,\) must be \[5 channels\]"),
    "bias-dtype": ({"bias": torch.zeros(5).half()}, r"bias is torch.float16, and x torch.float32"),
}


@pytest.mark.parametrize(("changes", "message"), CONV_ERRORS.values(), ids=CONV_ERRORS)
def test_arguments_of_a_convolution_that_do_not_fit_are_named(changes: dict[str, Any], message):
    case = zero_conv_case(CPU)
    with pytest.raises(ValueError, match=message):
        causal_conv(**vars(replace(case, **changes)))
