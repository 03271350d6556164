"""The compiled kernels of Gated DeltaNet against the reference, on each instruction set that this processor has."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from headrace.kernels.gated_delta import gated_delta_rule, gated_rms_norm
from headrace.kernels.gated_delta.native import (
    gated_delta_rule_native,
    gated_rms_norm_native,
    takes_native_norm,
    takes_native_rule,
)
from headrace.kernels.gated_delta.reference import (
    gated_delta_rule_reference,
    gated_rms_norm_reference,
)
from headrace.kernels.native import InstructionSet, runs_native
from headrace.kernels.recurrent_states import StateSlots

from .native_cases import LENGTHS, check_states, native_kernels, of_every_way, some_slots, some_states
from .tolerances import DTYPES, TOLERANCES, assert_close

pytestmark = native_kernels

# Key heads, heads, key_dim and value_dim.
SHAPES = [
    (2, 2, 128, 128),
    (1, 2, 16, 16),
    (1, 1, 48, 80),
    (2, 6, 80, 48),
    (1, 4, 64, 144),
    (1, 1, 256, 32),
    (1, 2, 16, 256),
]


@dataclass(frozen=True)
class Rule:
    """What a call of the delta rule is given."""

    mixed: Tensor
    decay: Tensor
    beta: Tensor
    decay_scale: Tensor
    decay_bias: Tensor
    states: Tensor
    slots: StateSlots
    doubles_beta: bool

    @classmethod
    def draw(cls, shape: tuple[int, int, int, int], query_lens: Sequence[int], dtype: torch.dtype) -> "Rule":
        """Each row is part of a wider one, whose rest is NaN. Of several key heads it doubles beta."""
        num_key_heads, num_heads, key_dim, value_dim = shape
        slots = some_slots(query_lens)

        def rows(size: int) -> Tensor:
            wide = torch.full((slots.num_tokens, size + 5), torch.nan)
            wide[:, 2:-3] = torch.randn(slots.num_tokens, size)
            return wide.to(dtype)[:, 2:-3]

        return cls(
            rows(2 * num_key_heads * key_dim + num_heads * value_dim),
            rows(num_heads),
            rows(num_heads),
            torch.randn(num_heads),
            torch.randn(num_heads),
            some_states(slots, torch.float32, num_heads, key_dim, value_dim),
            slots,
            doubles_beta=num_key_heads > 1,
        )

    def run(self, rule: Callable[..., Tensor], states: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The output, and what the states are then: `states` themselves, or else a copy of its own."""
        states = self.states.clone() if states is None else states
        arguments = (self.mixed, self.decay, self.beta, self.decay_scale, self.decay_bias, states, self.slots)
        return rule(*arguments, doubles_beta=self.doubles_beta), states

    def check(self, instructions: InstructionSet) -> None:
        output, states = self.run(partial(gated_delta_rule_native, instructions=instructions))
        expected, expected_states = self.run(gated_delta_rule_reference)
        assert_close(output, expected)
        check_states(states, expected_states, self.states, self.slots)

    def part(self, first: int, end: int) -> "Rule":
        """Some of the tokens of the first sequence, which changes its state in place."""
        slots = StateSlots([end - first], self.slots.read[:1], self.slots.read[:1], torch.device("cpu"))
        mixed, decay, beta = (each[first:end] for each in (self.mixed, self.decay, self.beta))
        return replace(self, mixed=mixed, decay=decay, beta=beta, slots=slots)


@of_every_way
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rule_of_lone_tokens(shape, instructions, dtype):
    Rule.draw(shape, [1] * 5, dtype).check(instructions)


@of_every_way
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rule_of_every_length(shape, instructions, dtype):
    Rule.draw(shape, LENGTHS, dtype).check(instructions)


@of_every_way
def test_rule_of_every_number_of_a_few_tokens(instructions, dtype):
    Rule.draw((1, 2, 32, 48), range(1, 14), dtype).check(instructions)


@of_every_way
def test_rule_of_tokens_that_forget_or_keep_all(instructions, dtype):
    """A rate that leaves nothing of the state, one that is beyond softplus' bend, writes of none and of all."""
    rule = Rule.draw((1, 2, 32, 48), [1, 9, 33], dtype)
    rule.decay[::2] = 100
    rule.decay[1::3] = -100
    rule.beta[::3] = -200
    rule.beta[1::3] = 200
    for scale in (-9.0, 0.0, 4.0):
        replace(rule, decay_scale=torch.full((2,), scale)).check(instructions)


@of_every_way
def test_rule_of_keys_and_queries_of_no_length(instructions, dtype):
    rule = Rule.draw((1, 1, 16, 16), [1, 6], dtype)
    rule.mixed[::2, :32] = 0
    rule.mixed[1::2, :32] *= 1e-3
    rule.check(instructions)


@of_every_way
def test_rule_with_states_between_others(instructions, dtype):
    """A layer's of all layers', at no even address."""
    rule = Rule.draw((1, 2, 32, 48), [1, 2, 9, 1], dtype)
    num_slots, size = len(rule.states), rule.states[0].numel()
    of_layers = torch.full((num_slots * 2 * size + 1,), torch.nan)[1:].view(num_slots, 2, *rule.states.shape[1:])
    of_layers[:, 1] = rule.states
    native = partial(gated_delta_rule_native, instructions=instructions)
    output, states = rule.run(native, of_layers[:, 1])
    expected, expected_states = rule.run(native)
    assert torch.equal(output, expected)
    assert torch.equal(states.nan_to_num(7), expected_states.nan_to_num(7))
    assert of_layers[:, 0].isnan().all()


@of_every_way
@pytest.mark.parametrize("ends", [[1], [64], [3, 67, 68, 130], range(1, 131)], ids=["first", "chunk", "few", "each"])
def test_rule_gives_the_same_however_a_prompt_is_split(ends, instructions, dtype):
    """But for what float32 rounds: states are float32 between the parts as they are within a call."""
    rule = Rule.draw((1, 2, 64, 48), [130], dtype).part(0, 130)
    native = partial(gated_delta_rule_native, instructions=instructions)
    whole, whole_states = rule.run(native)
    states = rule.states.clone()
    cuts = [0, *ends, *({130} - set(ends))]
    parts = [rule.part(first, end).run(native, states)[0] for first, end in pairwise(cuts)]
    assert_close(torch.cat(parts), whole)
    assert_close(states[1], whole_states[1])


@of_every_way
def test_rule_with_several_threads(instructions, dtype, request):
    """A key head's columns are divided too, where there are few heads: each has the same numbers."""
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    rules = [Rule.draw((1, 2, 128, 144), [9], dtype), Rule.draw((2, 2, 128, 128), [1] * 9 + [70], dtype)]
    native = partial(gated_delta_rule_native, instructions=instructions)
    alone = [rule.run(native) for rule in rules]
    for threads in (2, 3):
        torch.set_num_threads(threads)
        for rule, (expected, expected_states) in zip(rules, alone, strict=True):
            output, states = rule.run(native)
            assert torch.equal(output, expected)
            assert torch.equal(states.nan_to_num(7), expected_states.nan_to_num(7))


def test_rule_takes_the_compiled_kernel_where_there_is_one():
    for shape, is_taken in (
        ((1, 2, 32, 48), True),
        ((1, 2, 20, 48), False),
        ((1, 2, 32, 24), False),
        ((1, 1, 272, 16), False),
    ):
        for dtype in DTYPES:
            rule = Rule.draw(shape, [1, 7], dtype)
            tensors = (rule.mixed, rule.decay, rule.beta, rule.decay_scale, rule.decay_bias, rule.states)
            assert takes_native_rule(*tensors) == (is_taken and runs_native(rule.mixed))
            assert not takes_native_rule(*tensors[:-1], rule.states.transpose(2, 3))
            output, states = rule.run(gated_delta_rule)
            expected, expected_states = rule.run(gated_delta_rule_reference)
            assert_close(output, expected)
            check_states(states, expected_states, rule.states, rule.slots)


@of_every_way
@pytest.mark.parametrize("shape", [(1, 1, 16), (3, 2, 48), (0, 2, 16), (7, 16, 128), (2, 5, 256)], ids=str)
def test_norm(shape, instructions, dtype):
    x, weight = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)
    gate = torch.randn(shape[0], shape[1] * shape[2] + 5).to(dtype)[:, 2:-3]
    output = gated_rms_norm_native(x, gate, weight, 1e-6, instructions)
    assert_close(output, gated_rms_norm_reference(x, gate, weight, 1e-6))
    assert torch.equal(gated_rms_norm(x, gate, weight, 1e-6), gated_rms_norm_native(x, gate, weight, 1e-6))


@of_every_way
def test_norm_with_gates_near_saturation(instructions, dtype):
    gate = torch.cat([torch.linspace(-30, 30, 1018), torch.tensor([-1e4, -200.0, -0.0, 200.0, 1e4, torch.nan])])
    gate = gate.to(dtype).view(1, -1)
    x, weight = torch.randn(1, 1, 1024).to(dtype), torch.randn(1024).to(dtype)
    output = gated_rms_norm_native(x, gate, weight, 1e-6, instructions)
    expected = gated_rms_norm_reference(x, gate, weight, 1e-6)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(output, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@of_every_way
def test_norm_rounds_where_the_reference_does(instructions, dtype):
    """Gates of 45 let all through, so that nothing but sums in another order differs."""
    x, weight = (torch.randn(100, 2, 64) * 3).to(dtype), torch.randn(64).to(dtype)
    gate = torch.full((100, 128), 45.0, dtype=dtype)
    output = gated_rms_norm_native(x, gate, weight, 1e-6, instructions)
    assert_close(output, gated_rms_norm_reference(x, gate, weight, 1e-6))
    if dtype == torch.bfloat16:
        assert (output != gated_rms_norm_reference(x, gate, weight, 1e-6)).float().mean() < 0.01


@of_every_way
def test_norm_with_several_threads(instructions, dtype, request):
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    x, gate, weight = (torch.randn(shape).to(dtype) for shape in ((401, 2, 48), (401, 96), (48,)))
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(gated_rms_norm_native(x, gate, weight, 1e-6, instructions))
    assert torch.equal(*results)


def test_norm_takes_the_compiled_kernel_where_there_is_one():
    for size, is_taken in ((32, True), (20, False)):
        for dtype in DTYPES:
            x, gate, weight = (torch.randn(shape).to(dtype) for shape in ((3, 2, size), (3, 2 * size), (size,)))
            assert takes_native_norm(x, gate, weight) == (is_taken and runs_native(x))
            assert not takes_native_norm(x.transpose(0, 1), gate, weight)
            assert_close(gated_rms_norm(x, gate, weight, 1e-6), gated_rms_norm_reference(x, gate, weight, 1e-6))
