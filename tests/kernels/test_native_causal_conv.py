"""The compiled kernels of short convolutions against the reference, on each instruction set that this processor has."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernels.causal_conv import causal_conv
from headrace.kernels.causal_conv.native import causal_conv_native, takes_native_conv
from headrace.kernels.causal_conv.reference import causal_conv_reference
from headrace.kernels.native import runs_native
from headrace.kernels.recurrent_states import StateSlots

from .causal_conv_cases import KINDS
from .native_cases import LENGTHS, check_states, native_kernels, of_every_way, some_slots, some_states
from .tolerances import DTYPES, assert_close

pytestmark = native_kernels


def check_conv(
    query_lens: Sequence[int],
    num_channels: int,
    width: int,
    dtype: torch.dtype,
    conv: Callable[..., Tensor],
    kind: str = "silu",
) -> tuple[Tensor, Tensor]:
    """What the convolution gives and leaves, which are what they should be."""
    slots = some_slots(query_lens)
    wide = torch.full((slots.num_tokens, num_channels + 5), torch.nan)
    wide[:, 2:-3] = torch.randn(slots.num_tokens, num_channels)
    x, weight = wide.to(dtype)[:, 2:-3], torch.randn(num_channels, width).to(dtype)
    before = some_states(slots, dtype, width - 1, num_channels)
    states, expected_states, turned_states = before.clone(), before.clone(), before.clone()
    options: dict[str, Any] = {
        "bias": torch.randn(num_channels).to(dtype) if kind == "biased" else None,
        "silu": kind != "plain",
    }
    output = conv(x, weight, states, slots, **options)
    assert_close(output, causal_conv_reference(x, weight, expected_states, slots, **options))
    check_states(states, expected_states, before, slots)
    assert torch.equal(conv(x, weight.t().contiguous().t(), turned_states, slots, **options), output)
    return output, states


@of_every_way
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", range(2, 9))
def test_conv_of_every_width(width, kind, instructions, dtype):
    check_conv(LENGTHS, 48, width, dtype, partial(causal_conv_native, instructions=instructions), kind)


@of_every_way
@pytest.mark.parametrize("num_channels", [16, 128, 144, 1040])
def test_conv_of_every_number_of_channels(num_channels, instructions, dtype):
    check_conv([1, 2, 20], num_channels, 4, dtype, partial(causal_conv_native, instructions=instructions))


@of_every_way
def test_conv_with_several_threads(instructions, dtype, request):
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    conv = partial(causal_conv_native, instructions=instructions)

    def results(threads: int) -> tuple[Tensor, Tensor]:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        return check_conv([1] * 9 + [70], 1040, 4, dtype, conv)

    for one, three in zip(results(1), results(3), strict=True):
        assert torch.equal(one.nan_to_num(7), three.nan_to_num(7))


@of_every_way
def test_conv_gives_the_same_however_a_prompt_is_split(instructions, dtype):
    """To the bit: each token's sum is of the same inputs in the same order."""
    x, weight = torch.randn(40, 32).to(dtype), torch.randn(32, 4).to(dtype)
    states = torch.randn(2, 3, 32).to(dtype)
    split = states.clone()

    def conv(x: Tensor, states: Tensor) -> Tensor:
        slots = StateSlots([len(x)], [1], [1], torch.device("cpu"))
        return causal_conv_native(x, weight, states, slots, instructions)

    whole = conv(x, states)
    assert torch.equal(torch.cat([conv(part, split) for part in x.split([1, 2, 17, 19, 1])]), whole)
    assert torch.equal(split, states)


def test_conv_takes_the_compiled_kernel_where_there_is_one():
    for num_channels, width, is_taken in ((32, 4, True), (20, 4, False), (32, 9, False)):
        for dtype in DTYPES:
            x = torch.randn(3, num_channels).to(dtype)
            weight, states = (
                torch.randn(num_channels, width).to(dtype),
                torch.randn(1, width - 1, num_channels).to(dtype),
            )
            assert takes_native_conv(x, weight, states) == (is_taken and runs_native(x))
            assert takes_native_conv(x, weight, states, weight[:, 0].contiguous()) == (is_taken and runs_native(x))
            assert not takes_native_conv(x, weight, states, weight[:, 0])
            check_conv([1, 7], num_channels, width, dtype, causal_conv)
