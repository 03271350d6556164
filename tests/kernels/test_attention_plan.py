"""Work lists of the GPU's attention: every query meets every key it sees, once."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.kernels.paged_attention import AttentionMetadata
from headrace.kernels.paged_attention.plan import ITEM_FIELDS, AttentionPlan, Tiling
from headrace.kernels.paged_attention.planning import MIN_SHARED_TOKENS, is_worth_sharing
from headrace.kernels.paged_attention.prefix_groups import Gate
from headrace.kernels.paged_attention.prefix_levels import SharedSpan, shared_spans

from .shared_prefix_cases import FIRST, NESTED, SECOND, SYSTEM, Row, build

TILING = Tiling(narrow_queries=4, wide_queries=32, tile=64, num_kv_heads=2, narrow_programs=8, wide_programs=2)


def at_least(members: int, blocks: int) -> Gate:
    return lambda num_members, num_blocks: num_members >= members and num_blocks >= blocks


def spans_of(metadata: AttentionMetadata, gate: Gate) -> list[SharedSpan]:
    usable = [
        (context - queries) // metadata.block_size
        for context, queries in zip(metadata.context_lens, metadata.query_lens, strict=True)
    ]
    return shared_spans(metadata.block_tables, usable, gate)


def seen(plan: AttentionPlan, block_size: int, sliding_window: int | None) -> Counter[tuple[int, int]]:
    """How often the items let each token see each slot of the cache, as the kernel reads them."""
    pairs: Counter[tuple[int, int]] = Counter()
    for row in (*plan.narrow, *plan.wide):
        item = dict(zip(ITEM_FIELDS, row.tolist(), strict=True))
        for nth in range(item["num_queries"]):
            token = int(plan.query_tokens[item["first_query"] + nth])
            position = item["first_position"] + nth
            for key in range(item["kv_begin"], min(item["kv_end"], position + 1)):
                if sliding_window is None or key > position - sliding_window:
                    block = int(plan.blocks[item["table"] + key // block_size])
                    pairs[token, block * block_size + key % block_size] += 1
    return pairs


def wanted(metadata: AttentionMetadata, sliding_window: int | None) -> Counter[tuple[int, int]]:
    pairs: Counter[tuple[int, int]] = Counter()
    size = metadata.block_size
    for start, length, context, table in zip(
        metadata.query_starts, metadata.query_lens, metadata.context_lens, metadata.block_tables, strict=True
    ):
        for nth in range(length):
            position = context - length + nth
            first = 0 if sliding_window is None else max(0, position - sliding_window + 1)
            for key in range(first, position + 1):
                pairs[start + nth, table[key // size] * size + key % size] += 1
    return pairs


def check(metadata: AttentionMetadata, gate: Gate, sliding_window: int | None = None) -> AttentionPlan:
    spans = [] if sliding_window else spans_of(metadata, gate)
    plan = AttentionPlan.build(metadata, TILING, spans, sliding_window)
    assert seen(plan, metadata.block_size, sliding_window) == wanted(metadata, sliding_window)
    check_parts(plan)
    return plan


def check_parts(plan: AttentionPlan) -> None:
    """Each token is either written by one final item or merged from all its parts, each in rows of its own."""
    final: Counter[int] = Counter()
    parts: dict[int, list[int]] = {}
    for row in (*plan.narrow, *plan.wide):
        item = dict(zip(ITEM_FIELDS, row.tolist(), strict=True))
        for nth in range(item["num_queries"]):
            token = int(plan.query_tokens[item["first_query"] + nth])
            if item["is_final"]:
                final[token] += 1
            else:
                parts.setdefault(token, []).append(item["first_partial"] + nth)
    assert set(final.values()) <= {1}
    assert not final.keys() & parts.keys()
    rows = [plan.merge_rows[a:b].tolist() for a, b in zip(plan.merge_starts, plan.merge_starts[1:], strict=False)]
    merged = dict(zip(plan.merge_tokens.tolist(), map(sorted, rows), strict=True))
    assert merged == {token: sorted(rows) for token, rows in parts.items()}
    assert sorted(plan.merge_rows.tolist()) == list(range(len(plan.merge_rows)))


sequences = st.lists(
    st.tuples(st.lists(st.integers(0, 1), max_size=4), st.integers(1, 70), st.integers(1, 70)), min_size=1, max_size=7
)


@settings(max_examples=150, deadline=None)
@given(sequences, st.sampled_from([8, 16]), st.sampled_from([None, 1, 9, 40]), st.integers(1, 3))
def test_every_query_meets_every_key_it_sees_once(rows, block_size, sliding_window, min_members):
    """Prefixes are paths in a small tree, so that sequences share them at all levels."""
    numbered = [
        Row([1 + int("1" + "".join(map(str, path[: depth + 1])), 2) for depth in range(len(path))], own, min(own, new))
        for path, own, new in rows
    ]
    check(build(numbered, block_size), at_least(min_members, 1), sliding_window)


def test_nested_prefixes_become_levels():
    metadata = build(NESTED)
    spans = [(sorted(span.members), span.begin, span.end) for span in spans_of(metadata, at_least(2, 1))]
    # The eight rows of both examples share the system prompt, and then each five and three their own example.
    assert sorted(spans) == [(list(range(5)), 10, 13), (list(range(8)), 0, 10), ([5, 6, 7], 10, 11), ([8, 9], 0, 8)]
    check(metadata, at_least(2, 1))


def test_an_outer_level_that_is_too_short_is_counted_to_the_inner_ones():
    tables = [[7, *FIRST], [7, *FIRST], [7, *SECOND[:3]], [7, 9]]
    spans = shared_spans(tables, [len(table) for table in tables], at_least(2, 5))
    assert [(span.members, span.begin, span.end) for span in spans] == [([0, 1], 0, 14)]


def test_long_contexts_are_cut_into_even_segments_and_none_is_empty():
    metadata = AttentionMetadata([1, 1], [2113, 70], [list(range(200)), list(range(200, 210))], 16)
    plan = check(metadata, at_least(2, 1))
    lengths = plan.narrow[:, ITEM_FIELDS.index("kv_end")] - plan.narrow[:, ITEM_FIELDS.index("kv_begin")]
    assert lengths.tolist() == sorted(lengths, reverse=True)
    assert lengths.min() > 0
    assert plan.merge_tokens.tolist() == [0]
    assert len(plan.merge_rows) == len(lengths) - 1 > 3


@pytest.mark.parametrize(
    ("groups", "segments"),
    [
        pytest.param([(256, 2048)], {1024: 16}, id="one-prefix"),
        pytest.param([(256, 8192)], {4096: 16}, id="a-long-one"),
        pytest.param([(32, 2048)] * 8, {1024: 16}, id="eight-prefixes"),
        pytest.param([(128, 2048), (128, 512)], {704: 8, 640: 4, 512: 4}, id="a-short-one-too"),
        # One of 1,536 keys would be waited for: twice as many as run at once even that out.
        pytest.param([(128, 2048), (128, 1536)], {448: 16, 384: 16, 256: 4}, id="uneven"),
    ],
)
def test_prefixes_are_cut_into_as_many_segments_as_run_at_once_where_those_are_even(groups, segments):
    """On a Hopper GPU with Llama-3-8B's heads: each further segment has to start, and its parts are to be merged."""
    hopper = Tiling(4, 32, tile=64, num_kv_heads=8, narrow_programs=528, wide_programs=132)
    tables: list[list[int]] = []
    spans = []
    for members, prefix in groups:
        spans.append(SharedSpan([len(tables) + each for each in range(members)], 0, prefix // 16))
        # Which blocks they are is nothing to the plan.
        tables += [list(range(prefix // 16 + 1))] * members
    metadata = AttentionMetadata([1] * len(tables), [16 * len(table) for table in tables], tables, 16)
    plan = AttentionPlan.build(metadata, hopper, spans)
    items = [dict(zip(ITEM_FIELDS, row.tolist(), strict=True)) for row in plan.wide]
    assert Counter(item["kv_end"] - item["kv_begin"] for item in items) == segments


def test_few_queries_are_narrow_and_chunks_and_shared_prefixes_wide():
    chunk, decodes = Row([], 33, 33), [Row(SYSTEM, 3)] * 5
    plan = check(build([chunk, *decodes]), at_least(5, 5))
    num_queries = ITEM_FIELDS.index("num_queries")
    assert sorted(plan.narrow[:, num_queries]) == [1] * 5
    assert sorted(plan.wide[:, num_queries]) == [1, 5, 32]


def test_a_batch_of_nothing_is_a_plan_of_nothing():
    plan = AttentionPlan.build(AttentionMetadata([], [], [], 16), TILING)
    assert not len(plan.narrow)
    assert not len(plan.wide)
    assert not len(plan.merge_rows)


def test_sequences_without_new_tokens_have_no_items():
    plan = check(AttentionMetadata([0, 2], [9, 9], [[4, 5], [6, 7]], 8), at_least(2, 1))
    assert len(plan.narrow) == 1


@pytest.mark.parametrize(("sequences", "tokens"), MIN_SHARED_TOKENS)
def test_the_gate_follows_its_table(sequences, tokens):
    assert is_worth_sharing(sequences, tokens)
    assert not is_worth_sharing(sequences, tokens - 1)


def test_one_sequence_shares_nothing():
    assert not is_worth_sharing(1, 10**6)


@pytest.mark.parametrize(
    "contexts", [[5000], [300] * 3, [129] * 40, [4000, 200, 1], [127, 128, 129, 256, 257], [900] * 7], ids=str
)
def test_decodes_are_cut_into_no_more_items_than_there_is_room_for(contexts):
    first, tables = 0, []
    for context in contexts:
        tables.append(list(range(first, first + -(-context // 16))))
        first += len(tables[-1])
    plan = AttentionPlan.build(AttentionMetadata([1] * len(contexts), contexts, tables, 16), TILING)
    num_cuts = len(plan.narrow) - len(contexts)
    assert num_cuts <= TILING.max_narrow_cuts
