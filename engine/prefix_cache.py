"""Finds KV blocks that were computed before, by the hash of everything up to their end."""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import chain

from .block_pool import BlockPool

BlockHash = bytes
_ROOT: BlockHash = b"\0" * 16


def hash_blocks(token_ids: Sequence[int], block_size: int, known: Sequence[BlockHash] = ()) -> list[BlockHash]:
    """Chained 128-bit hashes of the full blocks of `token_ids`.

    `known` are hashes computed before for the first blocks; only those after them are computed. A block's hash
    covers its tokens and, through its parent's hash, all tokens before it.
    """
    hashes = list(known)
    parent = hashes[-1] if hashes else _ROOT
    first = len(hashes) * block_size
    data = array("i", token_ids[first : len(token_ids) // block_size * block_size]).tobytes()
    width = block_size * array("i").itemsize
    for start in range(0, len(data), width):
        parent = blake2b(parent + data[start : start + width], digest_size=16).digest()
        hashes.append(parent)
    return hashes


class PrefixCache:
    """Hands out KV blocks: cached ones by their hash, fresh ones by evicting the least recently used.

    Conservation: free + idle + owned blocks are all blocks, at any time (`check`).
    """

    def __init__(self, pool: BlockPool, enabled: bool = True) -> None:
        self._pool = pool
        self._enabled = enabled
        self._block_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}
        # Idle blocks, least recently used first.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def num_available(self) -> int:
        """How many blocks `allocate` can hand out now."""
        return self._pool.num_free + len(self._idle)

    def match(self, hashes: Sequence[BlockHash]) -> list[int]:
        """The longest run of cached blocks from the first hash on. Changes nothing."""
        blocks = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Make the caller an owner of blocks that `match` returned."""
        for block in blocks:
            if self._pool.share(block):
                del self._idle[block]

    def allocate(self, count: int) -> list[int]:
        """Take `count` fresh blocks, evicting idle ones where none is free.

        The caller has checked `num_available`.
        """
        while self._pool.num_free < count:
            self._evict_one()
        return [self._pool.allocate() for _ in range(count)]

    def insert(self, block: int, block_hash: BlockHash) -> None:
        """Make an owned block findable. If an equal block is known already, that one stays the known one."""
        if self._enabled and block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def forget(self, block: int) -> None:
        """Make a block unfindable: its content was never written."""
        if (block_hash := self._hash_of.pop(block, None)) is not None:
            del self._block_of[block_hash]

    def release(self, blocks: Sequence[int]) -> None:
        """Give up ownership of a sequence's blocks, given in the order of its block table.

        Released from the end, so that the start of a prefix, which more rows can use, is evicted last.
        """
        for block in reversed(blocks):
            if not self._pool.release(block):
                continue
            if block in self._hash_of:
                self._idle[block] = None
            else:
                self._pool.reclaim(block)

    def _evict_one(self) -> None:
        block, _ = self._idle.popitem(last=False)
        self.forget(block)
        self._pool.reclaim(block)

    def check(self, block_tables: Sequence[Sequence[int]]) -> None:
        """Assert the conservation law; `block_tables` are those of all owners. For tests: linear in the blocks."""
        owners = Counter(chain.from_iterable(block_tables))
        assert owners == self._pool.owners(), "a block has other owners than its count says"
        free, idle, owned = set(self._pool.free()), set(self._idle), set(owners)
        assert len(free) == self._pool.num_free, "a block is free twice"
        in_two_states = (free & idle) | (free & owned) | (idle & owned)
        assert not in_two_states, f"blocks in two states: {in_two_states}"
        assert len(free) + len(idle) + len(owned) == self._pool.num_blocks, "a block is lost"
        assert idle <= set(self._hash_of), "an idle block cannot be found"
        assert not free & set(self._hash_of), "a free block can be found"
        assert {block: key for key, block in self._block_of.items()} == self._hash_of, "the two indexes differ"
