"""Attention over paged blocks against its one-head-at-a-time reference, and that against plain attention."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headrace.kernels.paged_attention import AttentionMetadata, cpu, paged_attention_reference

from .attention_cases import MIXED, Case, Shape
from .tolerances import DTYPES, assert_close

SHAPES = [
    Shape((1,), (1,)),
    Shape((1, 1, 1), (1, 17, 200)),
    Shape((7,), (7,)),
    Shape((3, 64), (35, 65)),
    MIXED,
    replace(MIXED, block_size=8),
    replace(MIXED, block_size=32),
    replace(MIXED, num_heads=3, num_kv_heads=3),
    replace(MIXED, num_heads=6, num_kv_heads=2, head_dim=80),
    replace(MIXED, num_heads=8, num_kv_heads=1, head_dim=64),
    replace(MIXED, num_heads=7, num_kv_heads=1, head_dim=128, block_size=8),
    replace(MIXED, num_heads=5, num_kv_heads=1, head_dim=44, value_dim=36),
]


@pytest.mark.parametrize("sliding_window", [None, 1, 13, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_the_reference(shape, dtype, sliding_window):
    case = Case.build(shape, dtype)
    assert_close(case.run(sliding_window), case.reference(sliding_window))


@pytest.mark.parametrize("sliding_window", [None, 13])
def test_the_reference_is_plain_causal_attention(sliding_window):
    """One sequence whose blocks happen to lie in order is what torch computes without paging."""
    length, heads, dim = 40, 4, 16
    keys, values, queries = torch.randn(3, length, heads, dim, generator=torch.Generator().manual_seed(0))
    metadata = AttentionMetadata([length], [length], [list(range(5))], 8)
    actual = paged_attention_reference(
        queries, keys.view(5, 8, heads, dim), values.view(5, 8, heads, dim), metadata, 0.3, sliding_window
    )
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    visible = (distance >= 0) & (distance < (sliding_window or length))
    q, k, v = (tensor.transpose(0, 1) for tensor in (queries, keys, values))
    expected = scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=0.3).transpose(0, 1)
    assert_close(actual, expected)


def test_queries_whose_scores_are_too_many_are_taken_one_after_the_other(monkeypatch):
    monkeypatch.setattr(cpu, "_MAX_SCORES", 900)
    case = Case.build(replace(MIXED, num_heads=5, num_kv_heads=1, head_dim=44, value_dim=36))
    assert_close(case.run(), case.reference())


def test_layers_with_different_windows_share_a_batchs_metadata():
    case = Case.build(MIXED)
    for sliding_window in (13, None, 5, 13, None):
        assert_close(case.run(sliding_window), case.reference(sliding_window))


def test_a_sequence_does_not_depend_on_its_batch_mates():
    case = Case.build(MIXED)
    together = case.run()
    layout = case.metadata
    for index, (start, length) in enumerate(zip(layout.query_starts, layout.query_lens, strict=True)):
        one = AttentionMetadata([length], [layout.context_lens[index]], [layout.block_tables[index]], 16)
        alone = replace(case, query=case.query[start : start + length], metadata=one).run()
        assert_close(together[start : start + length], alone)


def written(metadata: AttentionMetadata, num_blocks: int) -> Tensor:
    """[num_blocks, block_size] bool: where a sequence has a token."""
    is_written = torch.zeros(num_blocks, metadata.block_size, dtype=torch.bool)
    for table, length in zip(metadata.block_tables, metadata.context_lens, strict=True):
        for position in range(length):
            is_written[table[position // metadata.block_size], position % metadata.block_size] = True
    return is_written


def test_what_lies_beyond_a_sequences_tokens_does_not_matter():
    case = Case.build(MIXED)
    expected = case.run()
    is_written = written(case.metadata, len(case.key_cache))
    case.key_cache[~is_written] = 1e4
    case.value_cache[~is_written] = -1e4
    assert torch.equal(case.run(), expected)


@pytest.mark.parametrize(("sliding_window", "soft_cap"), [(None, None), (13, None), (None, 5.0)])
@pytest.mark.parametrize("value_dim", [None, 8])
def test_nan_beyond_a_sequences_tokens_does_not_matter_to_torchs_attention(value_dim, sliding_window, soft_cap):
    """Another sequence has left it there. A table may name blocks that are written later."""
    case = Case.build(replace(MIXED, num_kv_heads=1, value_dim=value_dim))
    metadata = replace(case.metadata, block_tables=[[*table, 1] for table in case.metadata.block_tables])
    caches = case.key_cache, case.value_cache
    expected = paged_attention_reference(
        case.query, *caches, case.metadata, case.scale, sliding_window, soft_cap=soft_cap
    )
    is_written = written(case.metadata, len(case.key_cache))
    # In the engine that block is nobody's.
    is_written[0] = True
    for cache in caches:
        cache[~is_written] = torch.nan
    actual = cpu.paged_attention_padded(case.query, *caches, metadata, case.scale, sliding_window, soft_cap)
    assert_close(actual, expected)


def test_block_tables_may_be_longer_than_needed():
    case = Case.build(MIXED)
    longer = [[*table, 0, 1] for table in case.metadata.block_tables]
    assert torch.equal(replace(case, metadata=replace(case.metadata, block_tables=longer)).run(), case.run())


def test_nothing_is_changed():
    case = Case.build(MIXED)
    before = [tensor.clone() for tensor in (case.query, case.key_cache, case.value_cache)]
    case.run()
    assert all(map(torch.equal, before, (case.query, case.key_cache, case.value_cache)))


def test_every_sequence_is_in_one_group_and_padding_is_bounded():
    lengths = [(1, 9), (1, 10), (1, 300), (40, 300), (64, 64), (1, 17), (2, 500), (3, 3)]
    metadata = AttentionMetadata(
        [query for query, _ in lengths],
        [context for _, context in lengths],
        [list(range(-(-context // 16))) for _, context in lengths],
        16,
    )
    queries = [int(index) for group in metadata.padded_groups for index in group.token_index[group.is_query]]
    assert sorted(queries) == list(range(metadata.num_tokens))
    for group in metadata.padded_groups:
        assert int(group.is_query.sum(1).min()) * 2 >= group.is_query.shape[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: {"query": case.query[1:]}, r"query \(59, 4, 16\) must be \[60 tokens"),
        (lambda case: {"query": case.query[0]}, r"query \(4, 16\) must be"),
        (lambda case: {"query": case.query[..., :8]}, "must have head size 16"),
        (lambda case: {"query": case.query[:, :3]}, "a multiple of 2 heads"),
        (lambda case: {"key_cache": case.key_cache[1:]}, "must be equal"),
        (
            lambda case: {"key_cache": case.key_cache[0], "value_cache": case.value_cache[0]},
            r"\[num_blocks, block_size, num_kv_heads, head_dim\]",
        ),
        (
            lambda case: {"metadata": replace(case.metadata, block_size=8)},
            "key_cache has blocks of 16 tokens, metadata of 8",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, message):
    case = Case.build(MIXED)
    with pytest.raises(ValueError, match=message):
        replace(case, **change(case)).run()
