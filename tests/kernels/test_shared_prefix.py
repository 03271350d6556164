"""Sequences that share KV blocks: found, grouped, and attended to as if they did not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.paged_attention import paged_attention, paged_attention_reference
from headrace.kernels.paged_attention import prefix_groups as groups_module
from headrace.kernels.paged_attention.cpu import paged_attention_padded
from headrace.kernels.paged_attention.prefix_groups import Gate, PrefixGroup, prefix_groups

from .shared_prefix_cases import BATCHES, FIRST, NESTED, SECOND, SYSTEM, Row, build, tensors
from .tolerances import DTYPES, assert_close


@pytest.fixture(autouse=True)
def _small_batches_are_worth_it(monkeypatch):
    monkeypatch.setattr(groups_module, "MIN_SPARED_TOKENS", 64)


def at_least(members: int, blocks: int) -> Gate:
    return lambda num_members, num_blocks: num_members >= members and num_blocks >= blocks


@pytest.mark.parametrize("sliding_window", [None, 50])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (6, 2, 80), (7, 1, 64)])
@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
def test_against_the_reference(rows, heads, kv_heads, dim, dtype, sliding_window):
    metadata = build(rows)
    case = (*tensors(metadata, heads, kv_heads, dim, dtype), metadata, dim**-0.5, sliding_window)
    assert_close(paged_attention(*case), paged_attention_reference(*case))


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
def test_nan_beyond_a_sequences_tokens_does_not_matter(rows):
    metadata = build(rows)
    query, keys, values = tensors(metadata, 4, 2, 16, torch.float32)
    expected = paged_attention_reference(query, keys, values, metadata, 0.25)
    for table, length in zip(metadata.block_tables, metadata.context_lens, strict=True):
        if rest := length % metadata.block_size:
            for cache in (keys, values):
                cache[table[-1], rest:] = torch.nan
    assert_close(paged_attention_padded(query, keys, values, metadata, 0.25), expected)


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
def test_every_query_is_computed_once(rows):
    metadata = build(rows)
    tokens = [int(token) for group in metadata.shared_groups for token in group.tokens]
    assert sorted(tokens) == list(range(metadata.num_tokens))
    assert any(group.prefix_blocks is not None for group in metadata.shared_groups)


def test_long_chunks_read_the_prefix_by_themselves():
    shared = [group for group in build(BATCHES["long-chunks-apart"]).shared_groups if group.prefix_blocks is not None]
    assert [sorted(group.tokens.tolist()) for group in shared] == [[50, 51]]


def test_nested_prefixes_are_grouped_by_the_whole_of_their_own():
    metadata = build(NESTED)
    groups = prefix_groups(metadata.block_tables, [len(row.prefix) for row in NESTED], at_least(2, 4))
    assert sorted((sorted(group.members), group.num_blocks) for group in groups) == [
        ([0, 1, 2, 3, 4], 13),
        ([5, 6, 7], 11),
        ([8, 9], 8),
        ([10, 11], 0),
    ]


def test_an_inner_prefix_that_too_few_share_leaves_its_rows_with_the_outer_one():
    tables = [FIRST, FIRST, FIRST, SECOND, [*SYSTEM, 500]]
    groups = prefix_groups(tables, [len(table) for table in tables], at_least(2, 4))
    assert sorted((group.members, group.num_blocks) for group in groups) == [([0, 1, 2], 13), ([3, 4], 10)]


def test_blocks_that_the_step_itself_fills_do_not_count():
    """The sequence that fills a block sees only part of it; those that found it a moment later see it whole."""
    computing, following = Row(SYSTEM, 16, 16), Row([*SYSTEM, 1000], 8, 8)
    metadata = build([computing, following, following])
    assert metadata.block_tables[0] == metadata.block_tables[1][:11]
    case = (*tensors(metadata, 4, 2, 16, torch.float32), metadata, 0.25)
    assert_close(paged_attention(*case), paged_attention_reference(*case))
    shared = [group for group in metadata.shared_groups if group.prefix_blocks is not None]
    assert [sorted(group.tokens.tolist()) for group in shared] == [list(range(16, 32))]


def test_groups_that_are_not_worth_it_fall_back_to_what_they_share_with_others():
    pairs = [[*SYSTEM, 600 + index // 2] for index in range(8)]
    groups = prefix_groups(pairs, [11] * 8, at_least(4, 4))
    assert groups == [PrefixGroup(list(range(8)), 10)]


def test_the_gate_counts_the_keys_that_need_not_be_read(monkeypatch):
    monkeypatch.setattr(groups_module, "MIN_SPARED_TOKENS", 2 * len(SYSTEM) * 16)
    few, enough = build([Row(SYSTEM, 1)] * 2), build([Row(SYSTEM, 1)] * 3)
    assert [group.prefix_blocks is not None for group in few.shared_groups] == [False]
    assert [group.prefix_blocks is not None for group in enough.shared_groups] == [True]


trees = st.lists(st.lists(st.integers(0, 2), max_size=6), min_size=1, max_size=12)


@settings(max_examples=300, deadline=None)
@given(paths=trees, min_members=st.integers(2, 4), min_blocks=st.integers(1, 3), data=st.data())
def test_groups_share_what_they_say(paths, min_members, min_blocks, data):
    # A block's number tells its whole path, as in a real table: equal blocks have equal blocks before them.
    tables = [[hash(tuple(path[: depth + 1])) for depth in range(len(path))] for path in paths]
    usable = [data.draw(st.integers(0, len(table))) for table in tables]
    groups = prefix_groups(tables, usable, at_least(min_members, min_blocks))
    assert sorted(index for group in groups for index in group.members) == list(range(len(tables)))
    for group in groups:
        assert_shared(group, tables, usable, min_members, min_blocks)


def assert_shared(group: PrefixGroup, tables, usable, min_members: int, min_blocks: int) -> None:
    depth = group.num_blocks
    if depth:
        assert depth >= min_blocks
        assert len(group.members) >= min_members
        assert all(usable[index] >= depth for index in group.members)
    assert len({tuple(tables[index][:depth]) for index in group.members}) == 1
