"""Memory for the plans of captured steps: any step of so many tokens finds room in it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

from headrace.kernels.paged_attention import AttentionMetadata
from headrace.kernels.paged_attention.attention_shape import AttentionShape
from headrace.kernels.paged_attention.device_plan import LAUNCHES, PlanCapacity, PlanTooLargeError
from headrace.kernels.paged_attention.plan import AttentionPlan, Tiling
from headrace.kernels.paged_attention.prefix_levels import shared_spans
from headrace.kernels.paged_attention.static_plans import StaticPlans, step_capacity
from headrace.kernels.paged_attention.triton import paged_attention_triton

from .attention_cases import Case
from .shared_prefix_cases import BATCHES, Row, build, tensors
from .tolerances import assert_close

# Levels of three blocks each, of which a path in a small tree has up to three, and contexts that are split.
LEVEL = 3
rows = st.lists(
    st.tuples(
        st.lists(st.integers(0, 1), max_size=3), st.one_of(st.integers(1, 9), st.integers(1, 600)), st.integers(1, 40)
    ),
    min_size=1,
    max_size=12,
)
tilings = st.builds(
    Tiling,
    narrow_queries=st.integers(1, 16),
    wide_queries=st.integers(17, 64),
    tile=st.just(64),
    num_kv_heads=st.integers(1, 8),
    narrow_programs=st.integers(1, 400),
    wide_programs=st.integers(1, 150),
)


def numbered(path: list[int]) -> list[int]:
    """The blocks of a path's levels, which no other path has."""
    ends = [int("1" + "".join(map(str, path[: depth + 1])), 2) for depth in range(len(path))]
    return [LEVEL * end + nth for end in ends for nth in range(LEVEL)]


@settings(max_examples=200, deadline=None)
@given(rows, tilings, st.sampled_from([None, 100]))
def test_every_plan_has_room(drawn, tiling, sliding_window):
    metadata = build([Row(numbered(path), own, min(own, new)) for path, own, new in drawn], 8)
    usable = [
        (context - queries) // 8 for queries, context in zip(metadata.query_lens, metadata.context_lens, strict=True)
    ]
    spans = [] if sliding_window else shared_spans(metadata.block_tables, usable, lambda members, blocks: True)
    plan = AttentionPlan.build(metadata, tiling, spans, sliding_window)
    longest = max(len(table) for table in metadata.block_tables)
    room, taken = step_capacity(metadata.num_tokens, longest, tiling), PlanCapacity.of(plan)
    for name in PlanCapacity.__dataclass_fields__:
        assert getattr(taken, name) <= getattr(room, name), name


def attend(case: Case, metadata: AttentionMetadata) -> Tensor:
    return paged_attention_triton(case.query, case.key_cache, case.value_cache, metadata, case.scale)


def test_a_padded_steps_attention_is_what_the_plans_say(device):
    """One memory, different steps, and padding tokens behind them."""
    shape = AttentionShape(4, 2, 64, torch.float32)
    plans = StaticPlans([(shape, None)], 96, 20, 16, device)
    for name in ("decodes", "nested", "chunks", "decodes"):
        metadata = build(BATCHES[name], 16, device)
        query, key_cache, value_cache = tensors(metadata, 4, 2, 64, torch.float32)
        case = Case(query, key_cache, value_cache, metadata, 0.125)
        launches = plans.load(metadata)
        padded = Case(
            torch.cat((query, query.new_full((3, 4, 64), torch.nan))), key_cache, value_cache, metadata, 0.125
        )
        output = attend(padded, plans.metadata(metadata.num_tokens + 3, launches))
        assert_close(output[:-3], case.reference())


def test_no_more_is_launched_than_a_step_needs(device):
    plans = StaticPlans([(AttentionShape(4, 2, 64, torch.float32), None)], 64, 70, 16, device)
    short, long = AttentionMetadata([1], [30], [[1, 2]], 16, device), build([Row([], 1000)], 16, device)
    chunk = build([Row([], 60, 60)], 16, device)
    assert [plans.load(metadata) for metadata in (short, long, chunk)] == [
        {"narrow"},
        {"narrow", "merge_tokens"},
        set(LAUNCHES),
    ]


def test_a_step_that_is_too_large_is_refused(device):
    plans = StaticPlans([(AttentionShape(4, 2, 64, torch.float32), None)], 4, 3, 16, device)
    with pytest.raises(PlanTooLargeError, match="blocks takes 29 of 28"):
        plans.load(build([Row([], 29 * 16)], 16, device))
