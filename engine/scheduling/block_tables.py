"""Each sequence's block table: what it owns, shares with others, gives up, or leaves in the host's memory."""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator

from ..kv_cache.block_hashes import BlockHash, PromptHasher, num_common
from ..kv_cache.block_pool import NULL_BLOCK
from ..kv_cache.prefix_cache import PrefixCache
from ..kv_cache.swap import SwapSpace
from .decode_rows import DecodeRows
from .scheduled_sequence import as_decode
from .sequence import Sequence, new_block_table
from .state_tables import StateTables
from .step_plan import StepPlan, SwapIn


class BlockTables:
    """Changes sequences' block tables, and with them how much of each counts as computed.

    `sliding_window`: how far back the model looks in all its layers, if that is limited. `swap_space`: where preempted
    sequences may leave their KV. `states`: of a model that has recurrent states beside it.
    """

    def __init__(
        self,
        cache: PrefixCache,
        sliding_window: int | None = None,
        swap_space: SwapSpace | None = None,
        states: StateTables | None = None,
    ) -> None:
        self.cache = cache
        self.num_swaps = 0
        self._hasher = PromptHasher()
        self._window = sliding_window
        self._swap_space = swap_space
        self.states = states

    @property
    def has_window(self) -> bool:
        return self._window is not None

    def attach(self, sequence: Sequence, following: Sequence | None = None) -> None:
        """Own the cached blocks of the sequence's beginning; its last token is always left to compute.

        What it has in the host's memory continues them, where they reach as far. `following`: the next in the queue.
        """
        blocks = self._cached(sequence)
        num_cached = len(blocks)
        if self.states is not None:
            del blocks[self.states.attach(sequence, num_cached) :]
        num_computed_tokens = len(blocks) * sequence.block_size
        if (swapped := sequence.swapped) is not None:
            if swapped.first_block <= self._first_needed(sequence, swapped.num_computed_tokens):
                blocks += new_block_table([NULL_BLOCK]) * (swapped.first_block - len(blocks))
            if swapped.first_block <= len(blocks):
                num_computed_tokens = max(num_computed_tokens, swapped.num_computed_tokens)
        num_slid = 0
        # Of a prompt that begins like no other there are none.
        if blocks:
            sequence.began_cached = True
            num_slid = min(self._first_needed(sequence, num_computed_tokens), len(blocks))
            blocks[:num_slid] = new_block_table([NULL_BLOCK]) * num_slid
            if self._window is None:
                sequence.shared_run = self.cache.join(blocks, sequence.block_hashes)
            else:
                self.cache.share(blocks)
        sequence.block_table = blocks
        sequence.num_slid_blocks = num_slid
        sequence.num_computed_tokens = num_computed_tokens
        if self.states is not None and self.cache.is_enabled and sequence.may_read_cache:
            self.states.plan_snapshots(sequence, self._partings(sequence, num_cached, following))

    def _partings(self, sequence: Sequence, num_cached: int, following: Sequence | None) -> Iterator[int]:
        """After how many of its blocks others are going to part from the sequence, or have."""
        hashes = sequence.hashes()
        yield num_cached
        yield from self.cache.announced_ends(hashes)
        if following is not None:
            yield num_common(hashes, self._hashes(following))
        yield sequence.num_followed_tokens // sequence.block_size

    def awaits_state(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence is better off once a state is there that another one is computing."""
        if self.states is None or not sequence.may_read_cache:
            return False
        num_cached, usable = len(self._cached(sequence)), (sequence.num_tokens - 1) // sequence.block_size
        return self.states.awaits(sequence, sequence.hashes()[:usable], num_cached)

    def chunk(self, sequence: Sequence, budget: int) -> int:
        """How many of its tokens the sequence computes in a step, at most `budget`.

        More where these begin with an image that may not be cut.
        """
        num_tokens = self._uncut_chunk(sequence, budget)
        return num_tokens if self.states is None else self.states.chunk(sequence, num_tokens)

    def _uncut_chunk(self, sequence: Sequence, budget: int) -> int:
        """As `chunk`, were no state to be kept on the way."""
        num_tokens = min(sequence.num_uncomputed_tokens, budget)
        if sequence.images is not None:
            start = sequence.num_computed_tokens
            num_tokens = sequence.images.end_of_step(start, start + num_tokens) - start
        if self._window is None:
            return num_tokens
        # A sequence longer than the memory advances by what its window leaves free.
        last_block = self.cache.num_blocks + self._first_needed(sequence, sequence.num_computed_tokens)
        return min(num_tokens, last_block * sequence.block_size - sequence.num_computed_tokens)

    def can_begin(self, sequence: Sequence, budget: int) -> bool:
        """Whether there are blocks for a step's worth of the sequence, uncut.

        Begun with those up to a cut alone, it might have to give all of them up again before the next step.
        """
        return self.can_grow(sequence, self._uncut_chunk(sequence, budget))

    def can_grow(self, sequence: Sequence, num_tokens: int, num_spare: int = 0) -> bool:
        """Whether there are blocks for so many more tokens, and `num_spare` others."""
        if self.states is not None and not self.states.can_grow(sequence):
            return False
        return self._num_new_blocks(sequence, num_tokens) + num_spare <= self.cache.num_available

    def grow(
        self, sequence: Sequence, num_tokens: int, plan: StepPlan, is_new: bool, draft: tuple[int, ...] = ()
    ) -> None:
        """Schedule so many more tokens and a draft, with blocks for them and for what comes back from the host."""
        first_new, table = len(sequence.block_table), sequence.block_table
        if num_new := self._num_new_blocks(sequence, num_tokens + len(draft)):
            table.extend(self.cache.allocate(num_new))
        if is_new and (swapped := sequence.swapped) is not None:
            first = first_new - swapped.first_block
            if 0 <= first < swapped.num_blocks:
                blocks = table[first_new : swapped.first_block + swapped.num_blocks].tolist()
                plan.swapped_in.append(SwapIn(swapped, first, blocks))
        if self.states is not None:
            self.states.grow(sequence, num_tokens, plan)
        self._publish(sequence, num_tokens)
        plan.schedule(sequence, num_tokens, is_new, draft)

    def grow_decoding(self, sequences: Iterable[Sequence], plan: StepPlan) -> int:
        """Schedule a token of each that has one token to compute, and pass over those that have none.

        Up to the first that does something else, or that lacks a block; returns how many come before it.
        """
        if self._window is not None:
            return 0
        placed = []
        num_idle, states = 0, self.states
        for sequence in sequences:
            num_computed, size = sequence.num_computed_tokens, sequence.block_size
            num_uncomputed = len(sequence.token_ids) + sequence.num_unread_tokens - num_computed
            if num_uncomputed == 0:
                num_idle += 1
                continue
            if num_uncomputed > 1 or not num_computed or (states is not None and not states.stays(sequence)):
                break
            if len(sequence.block_table) * size == num_computed:
                if not self.cache.num_available:
                    break
                sequence.block_table.extend(self.cache.allocate(1))
            if num_computed % size == size - 1:
                self._publish(sequence, 1)
            placed.append(as_decode(sequence))
        plan.schedule_decodes(placed)
        return num_idle + len(placed)

    def publish_read(self, sequence: Sequence) -> None:
        """Make the block findable that the sequence's last known token fills, if it was computed before it was known.

        So it is by a step in flight, and where the token was guessed.
        """
        num_known = len(sequence.token_ids)
        is_full = num_known % sequence.block_size == 0 and sequence.num_computed_tokens >= num_known
        if is_full and self.cache.is_enabled:
            index = num_known // sequence.block_size - 1
            self.cache.insert(sequence.block_table[index], sequence.hashes()[index])

    def publish_filled(self, sequences: Iterable[Sequence]) -> None:
        """As `publish_read`, of sequences of which each has filled a block."""
        if not self.cache.is_enabled:
            return
        for sequence in sequences:
            block_hash = sequence.hash_filled()
            self.cache.insert(sequence.block_table[len(sequence.block_hashes) - 1], block_hash)

    def grow_decodes(self, decodes: DecodeRows) -> bool:
        """Blocks for one more token of each row; false, and nothing changed, where they run out."""
        num_new = len(decodes.beginning)
        if num_new > self.cache.num_available:
            return False
        decodes.begin_blocks(self.cache.allocate(num_new) if num_new else ())
        # With a token that nobody has read yet a block is published when that is read.
        if not decodes.num_unread_tokens:
            self.publish_filled(decodes.sequences[row] for row in decodes.filling)
        return True

    def slide(self, sequence: Sequence) -> None:
        """Give up the blocks that no later token can see."""
        first, table = self._first_needed(sequence, sequence.num_computed_tokens), sequence.block_table
        if first > sequence.num_slid_blocks:
            self.cache.release(table[sequence.num_slid_blocks : first])
            table[sequence.num_slid_blocks : first] = new_block_table([NULL_BLOCK]) * (first - sequence.num_slid_blocks)
            sequence.num_slid_blocks = first

    def shrink(self, sequence: Sequence) -> None:
        """Give up the blocks beyond the computed tokens, and what a second model has there."""
        sequence.num_drafted_tokens = min(sequence.num_drafted_tokens, sequence.num_computed_tokens)
        num_kept = sequence.num_blocks_for(sequence.num_computed_tokens)
        self.cache.release(sequence.block_table[num_kept:])
        del sequence.block_table[num_kept:]

    def detach(self, sequence: Sequence) -> None:
        """Give up all blocks; nothing of the sequence is computed any more."""
        run, sequence.shared_run = sequence.shared_run, None
        # From the end, as `release` does.
        self.cache.release(sequence.block_table if run is None else sequence.block_table[len(run) :])
        if run is not None:
            self.cache.leave(run)
        sequence.block_table = new_block_table()
        sequence.num_slid_blocks = 0
        sequence.num_computed_tokens = 0
        sequence.num_drafted_tokens = 0
        if self.states is not None:
            self.states.detach(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> list[tuple[int, int]]:
        """Give `child`, whose tokens are those that the parent has computed, the parent's KV.

        Full blocks are shared; of a last one that is not, the child gets a copy at once, as both write into it in
        their next step. Returns the (source, destination) pairs to be copied.
        """
        num_full, rest = divmod(parent.num_computed_tokens, parent.block_size)
        self.cache.share_owned(parent.block_table[:num_full])
        copies = self.cache.allocate(1) if rest else []
        child.began_cached = True
        child.block_hashes = list(parent.block_hashes)
        child.block_table = parent.block_table[:num_full] + new_block_table(copies)
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_slid_blocks = min(parent.num_slid_blocks, num_full)
        if self.states is not None:
            self.states.fork(parent, child)
        return [(parent.block_table[num_full], copy) for copy in copies]

    def can_fork(self, parent: Sequence) -> bool:
        return parent.num_computed_tokens % parent.block_size == 0 or self.cache.num_available > 0

    def forget_unwritten(self, sequence: Sequence) -> None:
        """Make the blocks unfindable that a failed step was to fill."""
        for block in sequence.block_table[sequence.num_computed_tokens // sequence.block_size :]:
            self.cache.forget(block)

    def swap_out(self, sequence: Sequence, plan: StepPlan) -> None:
        """Keep what nobody else keeps of a sequence's KV in the host's memory, if that is cheaper."""
        if self._swap_space is None or sequence.swapped is not None:
            return
        self.slide(sequence)
        self._part(sequence)
        table = sequence.block_table
        first = sequence.num_slid_blocks
        while first < len(table) and self.cache.is_held_by_others(table[first]):
            first += 1
        blocks = table[first:].tolist()
        sequence.swapped = self._swap_space.take(first, len(blocks), sequence.num_computed_tokens, sequence.block_size)
        if sequence.swapped is not None:
            plan.swapped_out.append((sequence, blocks))
            self.num_swaps += 1

    def _part(self, sequence: Sequence) -> None:
        """Own all blocks alone or with others, each by itself."""
        run, sequence.shared_run = sequence.shared_run, None
        if run is not None:
            self.cache.share_owned(run.blocks)
            self.cache.leave(run)

    def drop_swapped(self, sequence: Sequence) -> None:
        """Give up what the host keeps of a sequence, if it does."""
        if sequence.swapped is not None and self._swap_space is not None:
            self._swap_space.give_back(sequence.swapped)
            sequence.swapped = None

    def taint(self, sequence: Sequence) -> None:
        """Note that a running sequence's blocks hold NaNs."""
        self.cache.taint(sequence.block_table)
        if self.states is not None:
            self.states.pool.forget(sequence.block_hashes)

    def check(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        """Assert that every block is accounted for and owned by running sequences alone. For tests."""
        assert not any(each.block_table or each.shared_run for each in waiting), "a waiting sequence owns blocks"
        runs = Counter(each.shared_run for each in running if each.shared_run is not None)
        assert all(run.num_owners == number for run, number in runs.items()), "a run has other owners than it says"
        own = [each.block_table[len(each.shared_run or ()) :] for each in running]
        shared = [(each.block_table, each.shared_run.blocks) for each in running if each.shared_run is not None]
        assert all(table[: len(blocks)] == blocks for table, blocks in shared), "a table begins otherwise than its run"
        self.cache.check([*own, *(run.blocks for run in runs)])
        assert all(each.num_drafted_tokens <= each.num_computed_tokens for each in running), "guesses are taken as said"
        swapped = [each.swapped.num_blocks for each in (*waiting, *running) if each.swapped is not None]
        num_used = self._swap_space.num_used if self._swap_space is not None else 0
        assert sum(swapped) == num_used, "swap space is lost"
        if self.states is not None:
            self.states.check(running, waiting)

    def _first_needed(self, sequence: Sequence, num_computed_tokens: int) -> int:
        """The first block that tokens after the computed ones can see."""
        if self._window is None:
            return 0
        return max(0, num_computed_tokens - self._window + 1) // sequence.block_size

    def _cached(self, sequence: Sequence) -> "array[int]":
        """What the cache has of the sequence's beginning."""
        if not self.cache.is_enabled or not sequence.may_read_cache:
            return new_block_table()
        usable = (sequence.num_tokens - 1) // sequence.block_size
        return self.cache.match(self._hashes(sequence)[:usable], self._num_window_blocks(sequence))

    def _hashes(self, sequence: Sequence) -> list[BlockHash]:
        """As the sequence's own, in less time where the prompt before it began alike."""
        # Of a prompt with images the tokens are not all.
        if not sequence.block_hashes and sequence.images is None:
            sequence.block_hashes = self._hasher.hashes(sequence.token_ids, sequence.block_size, sequence.hash_root)
        return sequence.hashes()

    def _num_window_blocks(self, sequence: Sequence) -> int | None:
        """How many blocks before a block's first token that token can see."""
        return None if self._window is None else max(1, sequence.num_blocks_for(self._window - 1))

    def _num_new_blocks(self, sequence: Sequence, num_tokens: int) -> int:
        needed = sequence.num_blocks_for(sequence.num_computed_tokens + num_tokens)
        return needed - len(sequence.block_table)

    def _publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Make the blocks findable that these tokens fill."""
        first_full = sequence.num_computed_tokens // sequence.block_size
        last_full = (sequence.num_computed_tokens + num_tokens) // sequence.block_size
        if first_full == last_full or not self.cache.is_enabled:
            return
        # A block whose last token is still unread is published once that is read.
        hashes = sequence.hashes()
        for index in range(first_full, min(last_full, len(hashes))):
            self.cache.insert(sequence.block_table[index], hashes[index])
