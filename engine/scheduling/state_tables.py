"""Sequences' recurrent states: which one a step goes on from and which it leaves, and which are kept for others."""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from ..kv_cache.block_hashes import BlockHash
from ..kv_cache.state_pool import NULL_STATE, StatePool
from .sequence import Sequence
from .step_plan import StepPlan

# A state is kept, and waited for, where others are spared so many tokens at least.
_MIN_TOKENS = 32


class StateTables:
    """A block of keys and values serves whoever begins with it; a state is that of one length alone.

    So a prompt is cut where others are going to part from it, and the state there is kept: at the end of an announced
    prefix, where the next in the queue parts, where blocks are cached that somebody else's prompt has filled, and where
    the next turn of a conversation is going to. Whoever shares a state that is still being made waits for it. States
    are not copied: a step that finds its sequence's state shared or kept leaves the next one elsewhere. So it does
    where it must not lose the state should it fail: what it changes in place is lost then, once for each sequence.
    """

    def __init__(self, pool: StatePool) -> None:
        self.pool = pool
        # Ends of prefixes up to which running sequences are going to compute, and who does.
        self._promised: dict[BlockHash, Sequence] = {}

    def attach(self, sequence: Sequence, num_cached: int) -> int:
        """Own the longest kept state of the sequence's beginning, of which `num_cached` blocks are cached.

        Returns how many of these can be used.
        """
        number, state = self.pool.find(sequence.block_hashes[:num_cached])
        if state != NULL_STATE:
            self.pool.share(state)
        sequence.state = sequence.read_state = state
        return number

    def plan_snapshots(self, sequence: Sequence, ends: Iterable[int]) -> None:
        """Have the states kept after so many blocks, where that spares others enough, and not the whole prompt."""
        size, last = sequence.block_size, sequence.num_computed_tokens
        for end in sorted(set(ends)):
            if last + _MIN_TOKENS <= end * size < sequence.num_tokens:
                sequence.snapshot_ends.append(end)
                self._promised.setdefault(sequence.block_hashes[end - 1], sequence)
                last = end * size

    def awaits(self, sequence: Sequence, hashes: SequenceOf[BlockHash], num_cached: int) -> bool:
        """Whether a state is being made, by one as urgent, that would spare a waiting sequence enough.

        hashes: of all blocks that it could begin with; `num_cached`: how many of these are cached.
        """
        if not self._promised:
            return False
        number, _ = self.pool.find(hashes[:num_cached])
        first = number + sequence.num_blocks_for(_MIN_TOKENS)
        makers = (self._promised.get(block_hash) for block_hash in hashes[first - 1 :])
        return any(maker is not None and maker.priority <= sequence.priority for maker in makers)

    def chunk(self, sequence: Sequence, num_tokens: int) -> int:
        """How many of so many tokens come before the next state that is to be kept."""
        if not sequence.snapshot_ends:
            return num_tokens
        return min(num_tokens, sequence.snapshot_ends[0] * sequence.block_size - sequence.num_computed_tokens)

    def stays(self, sequence: Sequence) -> bool:
        """Whether its next step may change its state in place: it is nobody else's, nor kept, nor to be spared."""
        return self._is_own(sequence) and not self.pool.is_kept(sequence.state) and not sequence.spares_state

    def can_grow(self, sequence: Sequence) -> bool:
        """Whether there is a state for the sequence's next step to leave."""
        return self.pool.num_available > 0 or (self._is_own(sequence) and not sequence.spares_state)

    def _is_own(self, sequence: Sequence) -> bool:
        return sequence.state != NULL_STATE and not self.pool.is_owned_by_others(sequence.state)

    def grow(self, sequence: Sequence, num_tokens: int, plan: StepPlan) -> None:
        """Give the sequence a state that a step of so many tokens may change, and note if that is to be kept."""
        if not self.stays(sequence):
            if self.pool.num_available:
                sequence.state = self.pool.allocate()
                plan.moved_states.append(sequence)
            else:
                # Nobody else needs it as much.
                self.pool.let_go(sequence.state)
        end = sequence.num_computed_tokens + num_tokens
        if sequence.snapshot_ends and sequence.snapshot_ends[0] * sequence.block_size == end:
            plan.snapshots.append((sequence, sequence.block_hashes[sequence.snapshot_ends[0] - 1]))

    def launched(self, plan: StepPlan) -> None:
        """Give up the states that the plan's sequences went on from, and let others find those that are to be kept."""
        for sequence in plan.moved_states:
            if sequence.read_state != NULL_STATE:
                self.pool.release(sequence.read_state)
            sequence.read_state = sequence.state
        for sequence, block_hash in plan.snapshots:
            self.pool.keep(sequence.state, block_hash)
            del sequence.snapshot_ends[0]
            self._break_promise(sequence, block_hash)

    def undo(self, plan: StepPlan, was_begun: bool) -> list[Sequence]:
        """Take back a plan, with which the device may have begun; returns whose states it may have changed."""
        if plan.is_launched:
            self.pool.forget(block_hash for _, block_hash in plan.snapshots)
            return [item.sequence for item in plan.scheduled]
        for sequence in plan.moved_states:
            self.pool.release(sequence.state)
            sequence.state = sequence.read_state
        if not was_begun:
            return []
        return [item.sequence for item in plan.scheduled if item.sequence not in plan.moved_states]

    def detach(self, sequence: Sequence) -> None:
        """Give up the sequence's state, and what it was going to keep for others."""
        if sequence.state != NULL_STATE:
            self.pool.release(sequence.state)
        sequence.state = sequence.read_state = NULL_STATE
        for end in sequence.snapshot_ends:
            self._break_promise(sequence, sequence.block_hashes[end - 1])
        sequence.snapshot_ends.clear()

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` go on from the parent's state."""
        self.pool.share(parent.state)
        child.state = child.read_state = parent.state

    def _break_promise(self, sequence: Sequence, block_hash: BlockHash) -> None:
        if self._promised.get(block_hash) is sequence:
            del self._promised[block_hash]

    def check(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Assert that every state is accounted for and owned by running sequences alone. For tests."""
        owners = list(running)
        assert not any(each.state or each.snapshot_ends for each in waiting), "a waiting sequence owns a state"
        assert all(each.state == each.read_state for each in owners), "a state is left that no step was launched for"
        assert all(bool(each.state) == bool(each.num_computed_tokens) for each in owners), "a state is of no tokens"
        self.pool.check(each.state for each in owners if each.state != NULL_STATE)
        assert all(maker in owners for maker in self._promised.values()), "a state is promised by nobody"
