"""Hashes of KV blocks: each stands for everything up to the block's end."""

from array import array
from collections.abc import Mapping, Sequence
from hashlib import blake2b

import numpy

BlockHash = bytes
ROOT: BlockHash = b"\0" * 16
_TOKEN_BYTES = array("i").itemsize


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
    parent = hashes[-1] if hashes else root
    first = len(hashes) * block_size
    tokens = token_ids[first : len(token_ids) // block_size * block_size]
    data = (tokens if isinstance(tokens, array) and tokens.typecode == "i" else array("i", tokens)).tobytes()
    width = block_size * _TOKEN_BYTES
    for start in range(0, len(data), width):
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


class PromptHasher:
    """Hashes prompts that come one after the other, and mostly begin as the one before: that is not hashed again."""

    def __init__(self) -> None:
        self._kind: tuple[int, BlockHash] | None = None
        self._token_ids = array("i")
        self._hashes: list[BlockHash] = []

    def hashes(self, token_ids: "array[int]", block_size: int, root: BlockHash) -> list[BlockHash]:
        """As `hash_blocks`; the list is the caller's."""
        # A copy: the sequence's own grows.
        tokens, kind = token_ids[:], (block_size, root)
        num_common = _num_common(tokens, self._token_ids, block_size) if kind == self._kind else 0
        hashes = self._hashes[: num_common // block_size]
        add_hashes(hashes, token_ids, block_size, root)
        self._kind, self._token_ids, self._hashes = kind, tokens, hashes
        return hashes.copy()


def _num_common(tokens: "array[int]", others: "array[int]", at_least: int) -> int:
    """How many tokens both begin with; 0 where these are fewer than `at_least`."""
    # Where nothing is shared this is all that it takes.
    if len(tokens) < at_least or tokens[:at_least] != others[:at_least]:
        return 0
    length = min(len(tokens), len(others))
    one, other = (numpy.frombuffer(each, dtype=numpy.int32, count=length) for each in (tokens, others))
    different = one != other
    first = int(different.argmax())
    return first if different[first] else length
