"""Where ordered rows are cut, by their number and by their bytes."""

import random
from array import array
from collections.abc import Sequence
from itertools import pairwise, takewhile

import pytest

from headrace.jobs.planning.shard_cutter import (
    TOKEN_BYTES,
    PrefixSharing,
    ShardCutter,
    common_prefix_bytes,
    shard_rows_of,
)
from headrace.storage.rows.external_sort import Item


def item(tokens: Sequence[int], num_bytes: int = 0) -> Item:
    key = array("i", tokens)
    key.byteswap()
    return key.tobytes(), bytes(num_bytes)


def sizes(cutter: ShardCutter, items: Sequence[Item]) -> list[int]:
    """How many rows each shard has; no row is lost, and their order is kept."""
    shards = list(cutter.cut(items))
    assert [each for shard in shards for each in shard] == list(items)
    return [len(shard) for shard in shards]


def bytes_of(items: Sequence[Item]) -> int:
    return sum(len(key) + len(payload) for key, payload in items)


def test_a_shard_ends_before_it_has_too_many_bytes():
    assert sizes(ShardCutter(8, shard_bytes=100), [item((), 30)] * 7) == [3, 3, 1]


@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_row_that_is_larger_than_a_shard_is_alone_in_one(place):
    rows = [item((), 30)] * 4
    rows.insert(place, item((), 1000))
    shards = list(ShardCutter(8, shard_bytes=100).cut(rows))
    assert [rows[place]] in shards
    assert sum(map(len, shards)) == 5


def test_tokens_count_as_bytes_too():
    assert sizes(ShardCutter(8, shard_bytes=100), [item([1] * 10)] * 4) == [2, 2]


def test_a_shard_cut_by_its_bytes_ends_where_a_prefix_does():
    """Eight rows would fit; the seventh begins another prefix."""
    rows = [item([1] * 32, 22)] * 6 + [item([2] * 32, 22)] * 6
    assert sizes(ShardCutter(100, shard_bytes=8 * 150), rows) == [6, 6]


@pytest.mark.parametrize("seed", range(10))
def test_no_shard_has_more_than_it_may(seed):
    generator = random.Random(seed)
    rows = sorted(
        item(generator.choices((1, 2), k=generator.randrange(40)), generator.randrange(120)) for _ in range(200)
    )
    cutter = ShardCutter(16, shard_bytes=1000)
    shards = list(cutter.cut(rows))
    assert [row for shard in shards for row in shard] == rows
    assert max(map(len, shards)) <= 16
    assert max(map(bytes_of, shards)) <= 1000
    within = sum(shared_tokens(shard) for shard in shards)
    prompt_tokens = sum(len(key) for key, _ in rows) // TOKEN_BYTES
    assert cutter.sharing == PrefixSharing(prompt_tokens, shared_tokens(rows), within)


def shared_tokens(rows: Sequence[Item]) -> int:
    return sum(map(spared_tokens, pairwise(rows)))


def spared_tokens(rows: tuple[Item, Item]) -> int:
    """Of the second prompt what an engine finds of the first one's blocks: never its last token."""
    (one, _), (other, _) = rows
    num_common, num_tokens = common_prefix_bytes(one, other) // TOKEN_BYTES, len(other) // TOKEN_BYTES
    return max((num for num in range(0, num_tokens, 16) if num <= num_common), default=0)


def test_only_whole_blocks_are_spared_and_never_all_of_a_prompt():
    cutter = ShardCutter(100)
    prompts = ([1] * 15, [1] * 16, [1] * 16, [1] * 17, [1] * 47, [1] * 48, [1] * 48)
    sizes(cutter, [item(()), item(()), *map(item, prompts)])
    assert cutter.sharing == PrefixSharing(15 + 2 * 16 + 17 + 47 + 2 * 48, 16 + 16 + 32 + 32, 16 + 16 + 32 + 32)


@pytest.mark.parametrize("num_common", [0, 1, 2, 127, 128, 129, 255, 256, 300])
def test_how_much_two_prompts_have_in_common(num_common):
    generator = random.Random(num_common)
    common = [generator.randrange(70_000) for _ in range(num_common)]
    for one, other in (([], []), ([], [5]), ([256], [512, 1]), ([1] * 200, [1 + 2**24] * 200), ([7], [7, 8])):
        expected = num_common + len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))
        assert common_prefix_bytes(item([*common, *one])[0], item([*common, *other])[0]) == expected * TOKEN_BYTES


@pytest.mark.parametrize(
    ("num_rows", "expected"), [(0, 256), (4_000_000, 256), (8_388_608, 512), (16_777_216, 1024), (10**9, 1024)]
)
def test_shards_of_millions_of_rows_are_larger(num_rows, expected):
    assert shard_rows_of(num_rows) == expected


@pytest.mark.parametrize(
    ("num_rows", "num_workers", "expected"),
    [(1000, 1, 256), (1000, 2, 125), (1000, 8, 32), (1001, 4, 63), (3, 8, 32), (8192, 8, 256), (10**9, 8, 1024)],
)
def test_a_small_job_is_cut_for_all_who_share_it(num_rows, num_workers, expected):
    assert shard_rows_of(num_rows, num_workers) == expected
