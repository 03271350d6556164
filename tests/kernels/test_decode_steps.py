"""What attention keeps from one step of the same decodes to the next is what it would make anew."""

from collections.abc import Iterator

import numpy
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from headrace.kernels.paged_attention import AttentionMetadata, DecodeStep, planning
from headrace.kernels.paged_attention.attention_shape import AttentionShape
from headrace.kernels.paged_attention.native_layout import NativeLayout, shared_with_previous
from headrace.kernels.paged_attention.static_plans import StaticPlans

from .attention_cases import CPU
from .decode_cases import Decodes, held_plan
from .shared_prefix_cases import Row
from .test_attention_plan import check_parts, seen, wanted

SHAPE = AttentionShape(4, 2, 64, torch.float32)
WINDOW = 40
rows = st.lists(
    st.tuples(st.lists(st.integers(0, 1), max_size=3), st.one_of(st.integers(1, 20), st.integers(250, 270))),
    min_size=1,
    max_size=5,
)


@pytest.fixture(autouse=True, scope="module")
def _prefixes_of_a_block_are_shared() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "MIN_SHARED_TOKENS", ((2, 1),))
        yield


def decodes(drawn: list[tuple[list[int], int]], block_size: int) -> Decodes:
    """Prefixes are paths in a small tree, so that sequences share them at all levels."""
    return Decodes(
        [
            Row([1 + int("1" + "".join(map(str, path[: depth + 1])), 2) for depth in range(len(path))], own)
            for path, own in drawn
        ],
        block_size,
    )


def new_plans(num_sequences: int, block_size: int, windows: tuple[int | None, ...]) -> StaticPlans:
    keys = [(SHAPE, window) for window in windows]
    return StaticPlans(keys, num_sequences, 60, block_size, CPU, num_places=2 * num_sequences)


def check(plans: StaticPlans, metadata: AttentionMetadata, places: NDArray[numpy.int64]) -> None:
    """The memory that a graph reads says what the step is."""
    assert plans.places.tolist() == places.tolist()
    for (_, window), held in plans._held.items():
        plan = held_plan(held)
        assert seen(plan, metadata.block_size, window) == wanted(metadata, window)
        check_parts(plan)


@settings(max_examples=25, deadline=None)
@given(rows, st.sampled_from([8, 16]), st.sampled_from([(None,), (WINDOW,), (None, WINDOW)]), st.integers(1, 12))
# Past where a plan is made anew.
@example([([0], 255), ([0, 1], 3), ([1], 1)], 8, (None, WINDOW), 40)
def test_plans_that_go_on_say_what_new_ones_would(drawn, block_size, windows, num_steps):
    batch, plans = decodes(drawn, block_size), new_plans(len(drawn), block_size, windows)
    for number in range(num_steps):
        metadata, places = batch.next(), numpy.arange(2 * len(drawn)) + number
        plans.load(metadata, places)
        # What is in between is the same, and takes its time to look at.
        if number < 4 or number >= num_steps - 8:
            check(plans, metadata, places)


def test_plans_go_on_until_their_room_is_full_and_only_with_the_next_step():
    batch = decodes([([0], 5), ([0], 9)], 8)
    plans = new_plans(2, 8, (None,))
    places = numpy.arange(4)
    made = []
    for _ in range(34):
        plans.load(batch.next(), places)
        made.append(plans._followed)
    assert all(each is made[0] for each in made[:33])
    assert made[33] is not made[0]
    batch.next()
    later = batch.next()
    plans.load(later, places)
    assert plans._followed is not made[33]
    check(plans, later, places)


def test_another_batch_in_between_ends_what_was_kept():
    batch, other = decodes([([0], 5), ([0], 9)], 8), decodes([([1], 30)], 8)
    plans, places = new_plans(2, 8, (None,)), numpy.arange(4)
    plans.load(batch.next(), places)
    plans.load(other.next(), places)
    back = batch.next()
    plans.load(back, places)
    check(plans, back, places)


@settings(max_examples=50, deadline=None)
@given(rows, st.sampled_from([4, 8]), st.integers(1, 80))
def test_native_layouts_that_go_on_say_what_new_ones_would(drawn, block_size, num_steps):
    batch = decodes(drawn, block_size)
    for number in range(num_steps):
        metadata = batch.next()
        layout = metadata.native_layout
        if number < num_steps - 2:
            continue
        anew = NativeLayout.build(metadata)
        counts = -(-anew.context_lens // block_size)
        assert layout.context_lens.tolist() == anew.context_lens.tolist()
        assert layout.query_starts.tolist() == anew.query_starts.tolist()
        width = anew.block_tables.shape[1]
        assert (layout.block_tables[:, :width] == anew.block_tables).all()
        assert not layout.block_tables[:, width:].any()
        assert sorted(layout.order) == list(range(len(drawn)))
        shared = shared_with_previous(layout.block_tables[layout.order], counts[layout.order])
        assert layout.shared_blocks.tolist() == shared.tolist()


def test_a_native_layout_stays_as_it_was_handed_out():
    batch = decodes([([0], 8), ([0, 1], 3)], 8)
    first = batch.next()
    layout = first.native_layout
    before = layout.context_lens.tolist()
    second = batch.next()
    assert second.native_layout.order is layout.order
    assert layout.context_lens.tolist() == before


def test_a_step_follows_the_one_right_before_it_alone():
    batch = decodes([([0], 5)], 8)
    steps = [metadata.decode_step for metadata in (batch.next(), batch.next(), batch.next())]
    first, second, third = (step for step in steps if isinstance(step, DecodeStep))
    assert second.follows(first)
    assert third.follows(second)
    assert not any((third.follows(first), first.follows(second), first.follows(None), first.follows(first)))
