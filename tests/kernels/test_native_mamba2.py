"""The compiled kernels of Mamba-2 against the reference, on each instruction set that this processor has."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from headrace.kernels.mamba2 import grouped_gated_rms_norm, selective_scan
from headrace.kernels.mamba2.native import (
    grouped_gated_rms_norm_native,
    selective_scan_native,
    takes_native_norm,
    takes_native_scan,
)
from headrace.kernels.mamba2.reference import grouped_gated_rms_norm_reference, selective_scan_reference
from headrace.kernels.native import InstructionSet, runs_native
from headrace.kernels.recurrent_states import StateSlots

from .mamba2_cases import ScanCase, scan_case
from .native_cases import LENGTHS, check_states, native_kernels, of_every_way, some_slots, some_states
from .tolerances import DTYPES, assert_close

pytestmark = native_kernels

# Groups, heads, state_dim and head_dim.
SHAPES = [(1, 2, 128, 64), (2, 2, 16, 16), (1, 1, 48, 80), (2, 6, 80, 48), (1, 4, 64, 144), (1, 1, 256, 32)]


def draw(shape: tuple[int, int, int, int], query_lens: Sequence[int], dtype: torch.dtype) -> ScanCase:
    """Each row is part of a wider one, whose rest is NaN."""
    _, num_heads, state_dim, head_dim = shape
    slots = some_slots(query_lens)
    case = scan_case(query_lens, shape, dtype, slots.device)
    wide = [torch.nn.functional.pad(each, (2, 3), value=torch.nan)[:, 2:-3] for each in (case.mixed, case.dt)]
    states = some_states(slots, torch.float32, num_heads, state_dim, head_dim)
    return replace(case, mixed=wide[0], dt=wide[1], states=states, slots=slots)


def run(scan: Callable[..., Tensor], case: ScanCase) -> tuple[Tensor, Tensor]:
    """The output, and what the states are then: a copy of the case's."""
    given = case.arguments
    return scan(**given), given["states"]


def check(case: ScanCase, instructions: InstructionSet) -> None:
    output, states = run(partial(selective_scan_native, instructions=instructions), case)
    expected, expected_states = run(selective_scan_reference, case)
    assert_close(output, expected)
    check_states(states, expected_states, case.states, case.slots)


@of_every_way
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scan_of_lone_tokens(shape, instructions, dtype):
    check(draw(shape, [1] * 5, dtype), instructions)


@of_every_way
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_scan_of_every_length(shape, instructions, dtype):
    check(draw(shape, LENGTHS, dtype), instructions)


@of_every_way
def test_scan_of_every_number_of_a_few_tokens(instructions, dtype):
    check(draw((1, 2, 32, 48), range(14), dtype), instructions)


@of_every_way
def test_scan_of_tokens_that_forget_or_keep_all(instructions, dtype):
    """A rate that leaves nothing of the state, and one that is beyond softplus' bend."""
    case = draw((1, 2, 32, 48), [1, 9, 33], dtype)
    case.mixed.mul_(0.1)
    case.dt[::2] = 30
    case.dt[1::3] = -100
    for scale in (-9.0, 0.0, 4.0):
        check(replace(case, decay_scale=torch.full((2,), scale)), instructions)


@of_every_way
def test_scan_with_limits(instructions, dtype):
    check(replace(draw((1, 2, 32, 48), [1, 9, 33], dtype), dt_limits=(0.5, 0.75)), instructions)


@of_every_way
def test_scan_with_states_between_others(instructions, dtype):
    """A layer's of all layers', at no even address."""
    case = draw((1, 2, 32, 48), [1, 2, 9, 1], dtype)
    num_slots, size = len(case.states), case.states[0].numel()
    of_layers = torch.full((num_slots * 2 * size + 1,), torch.nan)[1:].view(num_slots, 2, *case.states.shape[1:])
    of_layers[:, 1] = case.states
    native = partial(selective_scan_native, instructions=instructions)
    expected, expected_states = run(native, case)
    assert torch.equal(native(**vars(replace(case, states=of_layers[:, 1]))), expected)
    assert torch.equal(of_layers[:, 1].nan_to_num(7), expected_states.nan_to_num(7))
    assert of_layers[:, 0].isnan().all()


@of_every_way
@pytest.mark.parametrize("ends", [[1], [64], [3, 67, 68, 130], range(1, 131)], ids=["first", "chunk", "few", "each"])
def test_scan_gives_the_same_however_a_prompt_is_split(ends, instructions, dtype):
    """But for what float32 rounds: states are float32 between the parts as they are within a call."""
    case = draw((1, 2, 64, 48), [130], dtype)
    whole = replace(case, slots=StateSlots([130], [1], [1], case.slots.device))
    native = partial(selective_scan_native, instructions=instructions)
    expected, expected_states = run(native, whole)
    states, outputs = whole.states.clone(), []
    for first, end in pairwise([0, *ends, *({130} - set(ends))]):
        slots = StateSlots([end - first], [1], [1], whole.slots.device)
        part = replace(whole, mixed=whole.mixed[first:end], dt=whole.dt[first:end], states=states, slots=slots)
        outputs.append(native(**vars(part)))
    assert_close(torch.cat(outputs), expected)
    assert_close(states[1], expected_states[1])


@of_every_way
def test_scan_with_several_threads(instructions, dtype, request):
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    cases = [draw((1, 8, 128, 64), [9], dtype), draw((2, 4, 128, 64), [1] * 9 + [70], dtype)]
    native = partial(selective_scan_native, instructions=instructions)
    alone = [run(native, case) for case in cases]
    for threads in (2, 3):
        torch.set_num_threads(threads)
        for case, (expected, expected_states) in zip(cases, alone, strict=True):
            output, states = run(native, case)
            assert torch.equal(output, expected)
            assert torch.equal(states.nan_to_num(7), expected_states.nan_to_num(7))


def test_scan_takes_the_compiled_kernel_where_there_is_one():
    for shape, is_taken in (
        ((1, 2, 32, 48), True),
        ((1, 2, 20, 48), False),
        ((1, 2, 32, 24), False),
        ((1, 1, 272, 16), False),
    ):
        for dtype in DTYPES:
            case = draw(shape, [1, 7], dtype)
            tensors = (case.mixed, case.dt, case.decay_scale, case.dt_bias, case.skip, case.states)
            assert takes_native_scan(*tensors) == (is_taken and runs_native(case.mixed))
            assert not takes_native_scan(*tensors[:-1], case.states.transpose(2, 3))
            output, states = run(selective_scan, case)
            expected, expected_states = run(selective_scan_reference, case)
            assert_close(output, expected)
            check_states(states, expected_states, case.states, case.slots)


@of_every_way
@pytest.mark.parametrize("shape", [(1, 1, 16), (3, 2, 48), (0, 2, 16), (7, 8, 128), (2, 1, 528)], ids=str)
def test_norm(shape, instructions, dtype):
    """Tokens, groups and their size."""
    num_tokens, num_groups, group_size = shape
    size = num_groups * group_size
    x, weight = (torch.randn(num_tokens, size) * 3).to(dtype), torch.randn(size).to(dtype)
    gate = torch.randn(num_tokens, size + 5).to(dtype)[:, 2:-3]
    output = grouped_gated_rms_norm_native(x, gate, weight, 1e-6, num_groups, instructions)
    assert_close(output, grouped_gated_rms_norm_reference(x, gate, weight, 1e-6, num_groups))


@of_every_way
def test_norm_with_several_threads(instructions, dtype, request):
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    x, gate, weight = (torch.randn(shape).to(dtype) for shape in ((401, 96), (401, 96), (96,)))
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(grouped_gated_rms_norm_native(x, gate, weight, 1e-6, 2, instructions))
    assert torch.equal(*results)


def test_norm_takes_the_compiled_kernel_where_there_is_one():
    for size, num_groups, is_taken in ((32, 2, True), (48, 2, False), (20, 1, False)):
        for dtype in DTYPES:
            x, gate, weight = (torch.randn(shape).to(dtype) for shape in ((3, size), (3, size), (size,)))
            assert takes_native_norm(x, gate, weight, num_groups) == (is_taken and runs_native(x))
            given = x, gate, weight, 1e-6, num_groups
            assert_close(grouped_gated_rms_norm(*given), grouped_gated_rms_norm_reference(*given))
