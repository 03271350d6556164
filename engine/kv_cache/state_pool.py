"""Who owns which recurrent state, and which ones are kept at the ends of which prefixes. Free of torch."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from .block_hashes import BlockHash

# What a sequence goes on from of which nothing is computed. Never handed out, so what lies in it stays zero.
NULL_STATE = 0


class StatePool:
    """Reference counts over the states 1 to `num_states`; those that are kept can be found by their prefix's hash.

    A state is free (no owner, not kept), owned (by one or more sequences, kept or not) or idle (kept, and no owner).
    Where none is free, an idle one is given up, in the order of `PrefixCache`: those of prefixes that requests to come
    begin with (`is_announced`) after all others, of these the one that was not used for the longest time first.
    """

    def __init__(self, num_states: int, is_announced: Callable[[BlockHash], bool]) -> None:
        self.num_states = num_states
        self._is_announced = is_announced
        self._reference_counts = [0] * (num_states + 1)
        # Handed out from the end, so that lately used memory is used again first.
        self._free = list(range(num_states, NULL_STATE, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._state_of: dict[BlockHash, int] = {}
        self._hash_of: dict[int, BlockHash] = {}

    @property
    def num_available(self) -> int:
        """How many states `allocate` can hand out now."""
        return len(self._free) + len(self._idle)

    def find(self, hashes: Sequence[BlockHash]) -> tuple[int, int]:
        """Of a prefix with these blocks the longest beginning whose state is kept: its number of blocks, and the state.

        0 and `NULL_STATE` where there is none. Changes nothing.
        """
        if self._state_of:
            for number in range(len(hashes), 0, -1):
                if (state := self._state_of.get(hashes[number - 1])) is not None:
                    return number, state
        return 0, NULL_STATE

    def allocate(self) -> int:
        """A state that nobody else owns. The caller has checked `num_available`."""
        if not self._free:
            self.let_go(self._least_wanted())
        state = self._free.pop()
        self._reference_counts[state] = 1
        return state

    def share(self, state: int) -> None:
        """Add an owner to a state that is owned or idle."""
        self._idle.pop(state, None)
        self._reference_counts[state] += 1

    def release(self, state: int) -> None:
        """Take an owner away."""
        assert self._reference_counts[state] > 0, f"state {state} released more often than it was taken"
        self._reference_counts[state] -= 1
        if self._reference_counts[state]:
            return
        if state in self._hash_of:
            self._idle[state] = None
        else:
            self._free.append(state)

    def is_owned_by_others(self, state: int) -> bool:
        """Whether an owned state has further owners."""
        return self._reference_counts[state] > 1

    def is_kept(self, state: int) -> bool:
        return state in self._hash_of

    def keep(self, state: int, block_hash: BlockHash) -> None:
        """Make an owned state findable: it is that of the prefix whose last block has this hash."""
        if block_hash not in self._state_of:
            self._state_of[block_hash] = state
            self._hash_of[state] = block_hash

    def forget(self, hashes: Iterable[BlockHash]) -> None:
        """Keep these prefixes' states no longer."""
        for block_hash in hashes:
            if (state := self._state_of.get(block_hash)) is not None:
                self.let_go(state)

    def let_go(self, state: int) -> None:
        """Keep a state no longer."""
        self._forget(state)
        if state in self._idle:
            del self._idle[state]
            self._free.append(state)

    def _least_wanted(self) -> int:
        """An idle state."""
        unannounced = (state for state in self._idle if not self._is_announced(self._hash_of[state]))
        return next(unannounced, next(iter(self._idle)))

    def _forget(self, state: int) -> None:
        del self._state_of[self._hash_of.pop(state)]

    def check(self, owned: Iterable[int]) -> None:
        """Assert that every state is accounted for; `owned`: each as often as it has owners. For tests."""
        counts = [0] * (self.num_states + 1)
        for state in owned:
            counts[state] += 1
        assert counts == self._reference_counts, "a state has other owners than its count says"
        of_owners = {state for state, count in enumerate(counts) if count}
        assert not of_owners & {*self._free, *self._idle}, "an owned state is free or idle"
        assert len(self._free) + len(self._idle) + len(of_owners) == self.num_states, "a state is lost, or free twice"
        assert set(self._idle) <= set(self._hash_of), "an idle state is not kept"
        assert not set(self._free) & set(self._hash_of), "a free state is kept"
        assert {state: key for key, state in self._state_of.items()} == self._hash_of, "the two indexes differ"
