"""Hashes of KV blocks: each stands for everything up to the block's end."""

from array import array
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import numpy

BlockHash = bytes
ROOT: BlockHash = b"\0" * 16
_TOKEN_BYTES = array("i").itemsize


def salted(root: BlockHash, cache_salt: str | None) -> BlockHash:
    """The root of those blocks that only requests with the same `cache_salt` are to find; of None the root itself."""
    if cache_salt is None:
        return root
    # Personal: no tokens of a block have the hash.
    return blake2b(root + cache_salt.encode(), digest_size=16, person=b"cache salt").digest()


def hash_blocks(token_ids: Sequence[int], block_size: int, root: BlockHash = ROOT) -> list[BlockHash]:
    """Chained 128-bit hashes of the full blocks of `token_ids`.

    A block's hash covers its tokens and, through its parent's hash, all tokens before it and the `root`, which
    stands for what else their keys and values depend on.
    """
    hashes: list[BlockHash] = []
    add_hashes(hashes, token_ids, block_size, root)
    return hashes


def add_hashes(hashes: list[BlockHash], token_ids: Sequence[int], block_size: int, root: BlockHash = ROOT) -> None:
    """Append the hashes of those full blocks of `token_ids` that have none yet."""
    tokens = token_ids[len(hashes) * block_size :]
    data = (tokens if isinstance(tokens, array) and tokens.typecode == "i" else array("i", tokens)).tobytes()
    _add_chain(hashes, data, block_size * _TOKEN_BYTES, root)


def _add_chain(hashes: list[BlockHash], data: bytes, width: int, root: BlockHash) -> None:
    """Append the hashes of the blocks in `data`, of so many bytes each."""
    parent = hashes[-1] if hashes else root
    for start in range(0, len(data) - width + 1, width):
        parent = blake2b(parent + data[start : start + width], digest_size=16).digest()
        hashes.append(parent)


def add_marked_hashes(
    hashes: list[BlockHash], token_ids: "array[int]", block_size: int, root: BlockHash, marks: Mapping[int, bytes]
) -> None:
    """As `add_hashes`, where tokens do not say all: `marks`, by the index of a block, what else is in it."""
    for index in range(len(hashes), len(token_ids) // block_size):
        data = token_ids[index * block_size : (index + 1) * block_size].tobytes()
        parent = hashes[-1] if hashes else root
        hashes.append(blake2b(parent + data + marks.get(index, b""), digest_size=16).digest())


def hash_block(parent: BlockHash, token_ids: "array[int]") -> BlockHash:
    """The hash of one block of 32-bit tokens after the block of this hash."""
    return blake2b(parent + token_ids.tobytes(), digest_size=16).digest()


def num_common(hashes: Sequence[BlockHash], others: Sequence[BlockHash]) -> int:
    """How many blocks two prompts begin with alike: each hash says so of all before it."""
    return bisect_left(range(min(len(hashes), len(others))), True, key=lambda index: hashes[index] != others[index])


class PromptHasher:
    """Hashes prompts that come one after the other, and mostly begin as the one before: that is not hashed again."""

    def __init__(self) -> None:
        self._kind: tuple[int, BlockHash] | None = None
        self._data = b""
        # What the last two had in common.
        self._common = b""
        self._hashes: list[BlockHash] = []

    def hashes(self, token_ids: "array[int]", block_size: int, root: BlockHash) -> list[BlockHash]:
        """As `hash_blocks`; the list is the caller's."""
        data, width, kind = token_ids.tobytes(), block_size * _TOKEN_BYTES, (block_size, root)
        if kind != self._kind:
            self._data = self._common = b""
        length = len(self._common)
        # Mostly this one has no more and no less: then it is not searched for where they part.
        if not data.startswith(self._common) or data[length : length + width] == self._data[length : length + width]:
            self._common = _common(data, self._data, width)
            length = len(self._common)
        hashes = self._hashes[: length // width]
        _add_chain(hashes, data[length:], width, root)
        self._kind, self._data, self._hashes = kind, data, hashes
        return hashes.copy()


def _common(data: bytes, other: bytes, width: int) -> bytes:
    """What both begin with, in whole blocks of so many bytes."""
    length = min(len(data), len(other)) // width * width
    one, another = (numpy.frombuffer(each[:length], dtype=numpy.uint8) for each in (data, other))
    different = (one != another).nonzero()[0]
    return data[: different[0] // width * width if len(different) else length]
