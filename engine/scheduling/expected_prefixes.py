"""Prefixes that requests still to come begin with, and how many of them there are."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from ..kv_cache.block_hashes import BlockHash
from ..kv_cache.prefix_cache import PrefixCache
from .sequence import Sequence


@dataclass(slots=True)
class _Expectation:
    hashes: tuple[BlockHash, ...]
    num_requests: int


class ExpectedPrefixes:
    """Makes the cache keep a prefix's blocks for as long as requests are to come that begin with it."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        # By the hash of the prefix's last full block, which stands for all before it.
        self._by_end: dict[BlockHash, _Expectation] = {}

    def expect(self, hashes: SequenceOf[BlockHash], num_requests: int) -> None:
        """Announce so many more requests that begin with these blocks; a negative number takes back."""
        if not hashes:
            return
        known = self._by_end.get(hashes[-1])
        if known is None:
            known = self._by_end[hashes[-1]] = _Expectation(tuple(hashes), 0)
            self._cache.expect(known.hashes)
        known.num_requests += num_requests
        self._forget_if_done(known)

    def arrived(self, sequence: Sequence) -> None:
        """Count off the first sequence of a request that has begun, or never will. Free when nothing is expected."""
        if not self._by_end or sequence.branch:
            return
        for block_hash in sequence.hashes():
            if (expectation := self._by_end.get(block_hash)) is not None:
                expectation.num_requests -= 1
                self._forget_if_done(expectation)

    def _forget_if_done(self, expectation: _Expectation) -> None:
        if expectation.num_requests <= 0:
            del self._by_end[expectation.hashes[-1]]
            self._cache.expect_no_more(expectation.hashes)
