"""Cutting ordered rows into shards where their prompts have least in common."""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ...storage.spool import PlannedRow

# Less in common than this makes no difference to a prefix cache, which keeps whole blocks.
_BLOCK_TOKENS = 16
_TOKEN_BITS = 8 * array("i").itemsize


@dataclass
class PrefixSharing:
    """How much of a job's prompts need not be computed, because the prompt before begins alike.

    `shareable_tokens`: over all rows in the planned order, which is the most any order allows. `shared_tokens`: of
    these, those whose prompt before is in the same shard, so that they are spared wherever the shard runs.
    """

    prompt_tokens: int = 0
    shareable_tokens: int = 0
    shared_tokens: int = 0


class ShardCutter:
    """Makes shards of at most `shard_rows` rows; `sharing` says what they share, of the rows cut so far."""

    def __init__(self, shard_rows: int) -> None:
        self._shard_rows = shard_rows
        # A shard may end early, by a quarter, where a prefix ends: its rows then stay together.
        self._fewest_rows = shard_rows - shard_rows // 4
        self.sharing = PrefixSharing()

    def cut(self, rows: Iterable[PlannedRow]) -> Iterator[list[PlannedRow]]:
        """`rows` come with those that begin alike side by side."""
        shard: list[PlannedRow] = []
        # How many tokens each row of the shard has in common with the row before it.
        common: list[int] = []
        before = _NO_PROMPT
        for row in rows:
            prompt = _Prompt.of(row)
            num_common = common_prefix_length(before, prompt)
            if len(shard) == self._shard_rows:
                end = self._end([*common, num_common])
                yield self._take(shard[:end], common[:end])
                shard, common = shard[end:], common[end:]
            shard.append(row)
            common.append(num_common)
            before = prompt
        if shard:
            yield self._take(shard, common)

    def _end(self, common: list[int]) -> int:
        """How many rows the shard is to have: as many as may be, unless a cut before separates less."""
        places = range(self._shard_rows, self._fewest_rows - 1, -1)
        return min(places, key=lambda place: common[place] // _BLOCK_TOKENS)

    def _take(self, shard: list[PlannedRow], common: list[int]) -> list[PlannedRow]:
        self.sharing.prompt_tokens += sum(map(_num_tokens, shard))
        self.sharing.shareable_tokens += sum(common)
        self.sharing.shared_tokens += sum(common[1:])
        return shard


def _num_tokens(row: PlannedRow) -> int:
    return 0 if row.prompt_token_ids is None else len(row.prompt_token_ids)


class _Prompt(NamedTuple):
    """How many tokens, and all of them as one large number, the first token lowest."""

    length: int
    number: int

    @classmethod
    def of(cls, row: PlannedRow) -> "_Prompt":
        token_ids = row.prompt_token_ids
        if token_ids is None:
            return _NO_PROMPT
        return cls(len(token_ids), int.from_bytes(array("i", token_ids).tobytes(), "little"))


_NO_PROMPT = _Prompt(0, 0)


def common_prefix_length(one: _Prompt, other: _Prompt) -> int:
    """With how many equal tokens two prompts begin."""
    length = min(one.length, other.length)
    if not length or not (differing := one.number ^ other.number):
        return length
    # Where the lowest bit is by which they differ.
    return min(length, ((differing & -differing).bit_length() - 1) // _TOKEN_BITS)
