"""Short convolutions on the GPU against the obvious torch."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

from headrace.kernels.causal_conv.reference import causal_conv_reference
from headrace.kernels.causal_conv.triton import causal_conv_triton
from headrace.kernels.recurrent_states import StateSlots

from .causal_conv_cases import conv_case, zero_conv_case
from .state_cases import LENGTHS, assert_states, load_two_of_four, on
from .tolerances import assert_close

pytestmark = pytest.mark.usefixtures("_nan_filled_outputs")


@pytest.mark.parametrize(("width", "kind"), [(2, "silu"), (3, "plain"), (4, "biased"), (8, "silu")])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_convolutions(lengths, width, kind, triton_dtype, device):
    case = conv_case(LENGTHS[lengths], 304 if width == 4 else 19, width, triton_dtype, device, kind)
    given, expected = case.arguments, case.arguments
    assert_close(causal_conv_triton(**given), causal_conv_reference(**expected))
    assert_states(given["states"], expected["states"], case.states, case.slots, triton_dtype)


def test_another_step_in_the_same_table(triton_dtype, device):
    """As a graph replays decodes: what it has too many is padding, whose rows of the output nobody writes."""
    case = conv_case((1,) * 4, 40, 4, triton_dtype, device)
    of_two = load_two_of_four(case.slots)
    given, expected = case.arguments, case.arguments | {"x": case.x[:2], "slots": of_two}
    output = causal_conv_triton(**given)
    assert_close(output[:2], causal_conv_reference(**expected))
    assert bool(output[2:].isnan().all())
    assert_states(given["states"], expected["states"], case.states, of_two, triton_dtype)


def test_nothing(device):
    assert causal_conv_triton(**vars(conv_case((0,), 8, 4, torch.float32, device))).shape == (0, 8)


CONV_ERRORS = {
    "x": ({"x": torch.zeros(3, 10)[:, ::2]}, r"x \(3, 5\) must be contiguous in its last dimension"),
    "channels": ({"x": torch.zeros(3, 6)}, r"x \(3, 6\) must have the shape \[3, 5\]"),
    "weight": ({"weight": torch.zeros(4, 5).T}, r"weight \(5, 4\) must be contiguous"),
    "width": ({"weight": torch.zeros(5, 9)}, r"weight \(5, 9\) must be of a width of 2 to 8"),
    "states": ({"states": torch.zeros(3, 4, 5)}, r"states \(3, 4, 5\) must have the shape \[any, 3, 5\]"),
    "dtype": ({"states": torch.zeros(3, 3, 5).half()}, r"states \(3, 3, 5\) is float16"),
    "bias": ({"bias": torch.zeros(6)}, r"bias \(6,\) must have the shape \[5\]"),
    "slots": ({"slots": StateSlots((3,), (0,), (1,), torch.device("meta"))}, "slots are on meta, and must be on"),
}


@pytest.mark.parametrize(("changes", "message"), CONV_ERRORS.values(), ids=CONV_ERRORS)
def test_arguments_of_a_convolution_that_do_not_fit_are_named(changes: dict[str, Any], message, device):
    with pytest.raises(ValueError, match=message):
        causal_conv_triton(**vars(zero_conv_case(device)) | on(device, changes))
