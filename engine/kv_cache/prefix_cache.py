"""Finds KV blocks that were computed before, by the hash of everything up to their end."""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise, repeat, takewhile

from .block_hashes import BlockHash
from .block_pool import NULL_BLOCK, BlockPool
from .shared_run import SharedRun


class PrefixCache:
    """Hands out KV blocks: cached ones by their hash, fresh ones by evicting what is wanted least.

    Where it is not `is_enabled` nothing is found, and nobody need compute hashes for it.
    Evicted first are idle blocks that no announced request waits for (`expect`), of those the least recently used.
    Conservation: free + idle + owned + tainted blocks are all blocks, at any time (`check`).
    """

    def __init__(self, pool: BlockPool, enabled: bool = True) -> None:
        self._pool = pool
        self.is_enabled = enabled
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        # Idle blocks, least recently used first: those that nobody waits for, and those that somebody does.
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._awaited: OrderedDict[int, None] = OrderedDict()
        # What was joined last, while it has owners and all of it can be found.
        self._run: SharedRun | None = None
        # How many announced prefixes go through each block.
        self._expected: Counter[BlockHash] = Counter()
        # Blocks whose content would harm whoever gets them, and those of them that nobody owns any more.
        self._tainted: set[int] = set()
        self._to_be_zeroed: list[int] = []

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_available(self) -> int:
        """How many blocks `allocate` can hand out now."""
        return self._pool.num_free + len(self._idle) + len(self._awaited)

    def match(self, hashes: Sequence[BlockHash], num_needed: int | None = None) -> "array[int]":
        """The longest prefix whose cached blocks suffice to go on after it. Changes nothing.

        All blocks up to its end, or only the last `num_needed` where a sliding window hides those before: these are
        `NULL_BLOCK` in the result.
        """
        if num_needed is None:
            return self._first_run(hashes)
        end = self._last_run(hashes, num_needed)
        first = max(0, end - num_needed)
        return array("i", [NULL_BLOCK] * first + [self._block_of[block_hash] for block_hash in hashes[first:end]])

    def _first_run(self, hashes: Sequence[BlockHash]) -> "array[int]":
        known = self._run.blocks if self._run is not None and self._run.begins(hashes) else array("i")
        # All are looked up, though most may come after the first that is not there: a loop of Python's takes longer.
        blocks = list(map(self._block_of.get, hashes[len(known) :], repeat(NULL_BLOCK)))
        return known + array("i", blocks[: blocks.index(NULL_BLOCK)] if NULL_BLOCK in blocks else blocks)

    def _last_run(self, hashes: Sequence[BlockHash], num_needed: int) -> int:
        """Where the last run of `num_needed` cached blocks ends, or one that begins at the start."""
        length, end = 0, 0
        for index, block_hash in enumerate(hashes, start=1):
            length = length + 1 if block_hash in self._block_of else 0
            if length >= min(index, num_needed):
                end = index
        return end

    def share(self, blocks: Sequence[int]) -> None:
        """Make the caller an owner of blocks that `match` returned."""
        for block in self._pool.share(_without_null(blocks)):
            del (self._idle if block in self._idle else self._awaited)[block]

    def join(self, blocks: "array[int]", hashes: Sequence[BlockHash]) -> SharedRun:
        """As `share`, of blocks without gaps and their hashes; returns what the caller owns together with others.

        It is the first of the blocks or all of them, and is to be given up with `leave`.
        """
        run = self._run
        # One that is short for them is of use to nobody like the caller.
        if run is None or 2 * len(run) < len(blocks) or run.blocks != blocks[: len(run)]:
            self.share(blocks)
            self._run = SharedRun(blocks[:], hashes[len(blocks) - 1])
            return self._run
        run.num_owners += 1
        self.share(blocks[len(run) :])
        return run

    def leave(self, run: SharedRun) -> None:
        """Give up what `join` returned."""
        run.num_owners -= 1
        if run.num_owners:
            return
        # Its blocks are idle now: whoever joined it would not be counted.
        if self._run is run:
            self._run = None
        self.release(run.blocks)

    def share_owned(self, blocks: Sequence[int]) -> None:
        """Make the caller a further owner of blocks that have one."""
        self._pool.share(_without_null(blocks))

    def is_held_by_others(self, block: int) -> bool:
        """Whether a block of the caller's can be found later too, because others own it as well."""
        return block in self._hash_of and self._pool.is_shared(block)

    def allocate(self, count: int) -> list[int]:
        """Take `count` fresh blocks, evicting idle ones where none is free.

        The caller has checked `num_available`.
        """
        while self._pool.num_free < count:
            self._evict_one()
        return self._pool.allocate(count)

    def insert(self, block: int, block_hash: BlockHash) -> None:
        """Make an owned block findable. If an equal block is known already, that one stays the known one."""
        if self.is_enabled and block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def forget(self, block: int) -> None:
        """Make a block unfindable: its content was never written."""
        self._run = None
        self._forget(block)

    def _forget(self, block: int) -> None:
        if (block_hash := self._hash_of.pop(block, None)) is not None:
            del self._block_of[block_hash]

    def release(self, blocks: Sequence[int]) -> None:
        """Give up ownership of a sequence's blocks, given in the order of its block table.

        Released from the end, so that the start of a prefix, which more rows can use, is evicted last.
        """
        for block in self._pool.release(reversed(_without_null(blocks))):
            if (block_hash := self._hash_of.get(block)) is not None:
                (self._awaited if block_hash in self._expected else self._idle)[block] = None
            elif block in self._tainted:
                self._to_be_zeroed.append(block)
            else:
                self._pool.reclaim(block)

    def expect(self, hashes: Iterable[BlockHash]) -> None:
        """Announce a prefix that requests to come begin with: its blocks are evicted after all others."""
        for block_hash in hashes:
            self._expected[block_hash] += 1
            block = self._block_of.get(block_hash, NULL_BLOCK)
            if block in self._idle:
                del self._idle[block]
                self._awaited[block] = None

    def expect_no_more(self, hashes: Sequence[BlockHash]) -> None:
        """Take an announcement back."""
        for block_hash in reversed(hashes):
            self._expected[block_hash] -= 1
            if self._expected[block_hash]:
                continue
            del self._expected[block_hash]
            block = self._block_of.get(block_hash, NULL_BLOCK)
            if block in self._awaited:
                del self._awaited[block]
                self._idle[block] = None

    def is_announced(self, block_hash: BlockHash) -> bool:
        """Whether requests to come begin with the blocks up to the one of this hash."""
        return block_hash in self._expected

    def announced_ends(self, hashes: Sequence[BlockHash]) -> Iterator[int]:
        """After how many of a prompt's blocks announced prefixes end, or part from it."""
        counts = takewhile(bool, (self._expected[block_hash] for block_hash in hashes))
        for end, (here, following) in enumerate(pairwise(chain(counts, (0,))), start=1):
            if following < here:
                yield end

    def taint(self, blocks: Iterable[int]) -> None:
        """Note that owned blocks hold NaNs, which a mask lets through as 0 × NaN: nobody may find or inherit them."""
        for block in blocks:
            if block != NULL_BLOCK:
                self.forget(block)
                self._tainted.add(block)

    def to_be_zeroed(self) -> tuple[int, ...]:
        """Tainted blocks that nobody owns any more; to be overwritten with zeros, then passed to `zeroed`."""
        return tuple(self._to_be_zeroed)

    def zeroed(self, blocks: Iterable[int]) -> None:
        """Make blocks free that were tainted."""
        for block in blocks:
            self._to_be_zeroed.remove(block)
            self._tainted.remove(block)
            self._pool.reclaim(block)

    def _evict_one(self) -> None:
        block, _ = (self._idle or self._awaited).popitem(last=False)
        self._forget(block)
        self._pool.reclaim(block)

    def check(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Assert the conservation law; `block_tables` are those of all owners. For tests: linear in the blocks."""
        owners = Counter(block for block in chain.from_iterable(block_tables) if block != NULL_BLOCK)
        assert owners == self._pool.owners(), "a block has other owners than its count says"
        states = [set(self._pool.free()), set(self._idle), set(self._awaited), set(owners), set(self._to_be_zeroed)]
        assert len(states[0]) == self._pool.num_free, "a block is free twice"
        assert sum(map(len, states)) == self._pool.num_blocks, "a block is lost, or in two states"
        assert set().union(*states) == set(range(1, self._pool.num_blocks + 1)), "a block is lost, or in two states"
        free, idle, awaited, _, to_be_zeroed = states
        findable = set(self._hash_of)
        assert idle | awaited <= findable, "an idle block cannot be found"
        assert not (free | self._tainted) & findable, "a free or tainted block can be found"
        assert to_be_zeroed <= self._tainted <= to_be_zeroed | set(owners), "a tainted block is free"
        assert {block: key for key, block in self._block_of.items()} == self._hash_of, "the two indexes differ"
        if (run := self._run) is not None:
            assert run.num_owners > 0, "a run that nobody owns can be joined"
            assert set(run.blocks) <= findable & set(owners), "part of a run that can be joined cannot be found"
            assert self._hash_of[run.blocks[-1]] == run.last_hash, "a run has another hash than its last block"
        for block in idle | awaited:
            assert (self._hash_of[block] in self._expected) == (block in awaited), "a block is in the wrong queue"


def _without_null(blocks: Sequence[int]) -> Sequence[int]:
    # Only a sliding window leaves any: the first ones.
    if not blocks or blocks[0] != NULL_BLOCK:
        return blocks
    return [block for block in blocks if block != NULL_BLOCK]
