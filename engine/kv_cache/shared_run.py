"""Blocks that sequences begin with, owned by all of them together."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from .block_hashes import BlockHash


@dataclass(slots=True, eq=False)
class SharedRun:
    """A prefix's blocks, and the hash of the last one. For the pool its `num_owners` sequences are one owner of each.

    So a sequence that comes or goes changes one count, however long the prefix is.
    """

    blocks: "array[int]"
    last_hash: BlockHash
    num_owners: int = 1

    def __len__(self) -> int:
        return len(self.blocks)

    def begins(self, hashes: Sequence[BlockHash]) -> bool:
        """Whether a prompt whose blocks have these hashes begins with it. One hash tells: it covers those before it."""
        return len(hashes) >= len(self.blocks) and hashes[len(self.blocks) - 1] == self.last_hash
