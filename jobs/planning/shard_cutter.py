"""Cutting ordered rows into shards where their prompts have least in common. An item's key is its prompt's tokens."""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ...storage.rows.external_sort import Item

TOKEN_BYTES = array("i").itemsize
# A worker has several shards in memory, each more than once: as a table, as requests and as a part. What is counted
# are the tokens and the input's columns of its rows, four bytes a token.
SHARD_BYTES = 16 * 1024**2
# A prefix cache keeps whole blocks: what two prompts have in common beyond their last one is computed for each.
_BLOCK_BYTES = 16 * TOKEN_BYTES
# What another job waits for at most, and what a killed worker's successor looks through.
_SHARD_ROWS = 256
# Of a job with millions of rows: each shard is a row of the ledger, a message and a file or more of the data set.
_MOST_SHARD_ROWS = 1024
_WANTED_SHARDS = 16_384
# Of a small job each worker is to have so many: by default it has as many in its engine at a time.
_SHARDS_A_WORKER = 4
# Smaller shards are more work to hand out than there is to spread.
_LEAST_SHARD_ROWS = 32
# Of two prompts so much is compared at a time.
_STEP_BYTES = 512


@dataclass
class PrefixSharing:
    """How much of a job's prompts need not be computed, because the prompt before begins with the same KV blocks.

    `shareable_tokens`: over all rows in the planned order, which is the most any order allows. `shared_tokens`: of
    these, those whose prompt before is in the same shard, so that they are spared wherever the shard runs.
    """

    prompt_tokens: int = 0
    shareable_tokens: int = 0
    shared_tokens: int = 0


def shard_rows_of(num_rows: int, num_workers: int = 1) -> int:
    """How many rows a shard of a job has at most that so many workers share, unless the settings say."""
    most = min(max(_SHARD_ROWS, num_rows // _WANTED_SHARDS), _MOST_SHARD_ROWS)
    if num_workers == 1:
        return most
    fair = -(-num_rows // (num_workers * _SHARDS_A_WORKER))
    return min(most, max(_LEAST_SHARD_ROWS, fair))


class ShardCutter:
    """Makes shards of at most `shard_rows` rows and `shard_bytes`; `sharing` says what those cut so far share.

    A single row may have more bytes.
    """

    def __init__(self, shard_rows: int, shard_bytes: int = SHARD_BYTES) -> None:
        self._shard_rows = shard_rows
        self._shard_bytes = shard_bytes
        self.sharing = PrefixSharing()

    def cut(self, items: Iterable[Item]) -> Iterator[list[Item]]:
        """`items` come with those that begin alike side by side."""
        shard: list[Item] = []
        # How many bytes of tokens each row of the shard has in common with the row before it.
        common: list[int] = []
        num_bytes, before = 0, b""
        for item in items:
            key, payload = item
            num_common = common_prefix_bytes(before, key)
            num_bytes += len(key) + len(payload)
            while shard and (len(shard) == self._shard_rows or num_bytes > self._shard_bytes):
                end = _end([*common, num_common])
                yield self._take(shard[:end], common[:end])
                shard, common = shard[end:], common[end:]
                num_bytes = sum(map(_num_bytes, shard)) + _num_bytes(item)
            shard.append(item)
            common.append(num_common)
            before = key
        if shard:
            yield self._take(shard, common)

    def _take(self, shard: list[Item], common: list[int]) -> list[Item]:
        self.sharing.prompt_tokens += sum(len(key) for key, _ in shard) // TOKEN_BYTES
        spared = [_in_blocks(num_common, key) for num_common, (key, _) in zip(common, shard, strict=True)]
        self.sharing.shareable_tokens += sum(spared) // TOKEN_BYTES
        self.sharing.shared_tokens += sum(spared[1:]) // TOKEN_BYTES
        return shard


def _end(common: list[int]) -> int:
    """How many rows a full shard is to have: all but the last one here, unless a cut before separates less.

    It may end early, by a quarter, where a prefix ends: the rows after that then stay together.
    """
    most = len(common) - 1
    return min(range(most, most - most // 4 - 1, -1), key=lambda place: common[place] // _BLOCK_BYTES)


def _in_blocks(num_common: int, key: bytes) -> int:
    """Of the bytes in common those in whole blocks; never the prompt's last token, from which the answer begins."""
    return min(num_common, max(0, len(key) - TOKEN_BYTES)) // _BLOCK_BYTES * _BLOCK_BYTES


def _num_bytes(item: Item) -> int:
    key, payload = item
    return len(key) + len(payload)


def common_prefix_bytes(one: bytes, other: bytes) -> int:
    """Of the tokens with which two prompts both begin; each token's highest byte comes first."""
    start, length = 0, min(len(one), len(other))
    while start + _STEP_BYTES <= length and one[start : start + _STEP_BYTES] == other[start : start + _STEP_BYTES]:
        start += _STEP_BYTES
    end = min(start + _STEP_BYTES, length)
    differing = int.from_bytes(one[start:end]) ^ int.from_bytes(other[start:end])
    num_equal = end - (differing.bit_length() + 7) // 8
    return num_equal - num_equal % TOKEN_BYTES
