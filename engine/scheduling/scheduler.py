"""Which sequences compute how many tokens in the next step. Policy only: no torch."""

from bisect import bisect_right
from collections.abc import Collection, Container, Iterable, Mapping
from collections.abc import Sequence as SequenceOf

from .block_tables import BlockTables
from .decode_rows import DecodeRows
from .expected_prefixes import ExpectedPrefixes
from .sequence import Sequence
from .speculation import Draft, Speculation
from .step_plan import StepPlan
from .token_budget import TokenBudget
from .waiting_queue import WaitingQueue


class Scheduler:
    """Continuous batching over one token budget a step, with chunked prefill, priorities and preemption.

    No sequence is served in a step while a more urgent one goes short of tokens, seats or blocks. Every sequence added
    must fit the KV memory when alone; then the most urgent one always advances. Of prompts less urgent than somebody in
    the step a step takes fewer tokens (`TokenBudget.beside_urgent`); whoever decodes is served for all that.
    """

    def __init__(
        self,
        tables: BlockTables,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        speculation: Speculation | None = None,
    ) -> None:
        self._tables = tables
        self._speculation = speculation
        self._max_num_seqs = max_num_seqs
        self.budget = TokenBudget(max_num_batched_tokens)
        self.expected = ExpectedPrefixes(tables.cache)
        self.waiting = WaitingQueue()
        # The most urgent first, then in order of admission: the last one is the first to be preempted.
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        # All that run, while nobody joins or leaves them and they all decode.
        self.decodes: DecodeRows | None = None

    @property
    def guesses_may_follow(self) -> bool:
        """Whether the step after the one launched now may carry guesses, which depend on what this one brings."""
        if self._speculation is None:
            return False
        self.settle()
        return self._speculation.may_follow(self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.push(sequence)

    def schedule(self, among: Container[str] | None = None, is_ahead: bool = False) -> StepPlan:
        """Choose the next step's work; allocates its blocks and makes them findable for later sequences.

        Priority by priority what runs goes on, then newcomers are admitted. With `among`, only running sequences of
        the requests it names are served. With `is_ahead`, where a step in flight is counted as computed, nobody is
        preempted: a plan for which somebody would have to be is stuck.

        Blocks are findable as soon as the step that fills them is chosen: within a step every layer writes all its
        KV before attention reads any, so that sequences with the same new prefix compute it once even when they
        are admitted together. The one that does stands before the others, for pipelines that compute a step in parts.
        """
        drafts: Mapping[Sequence, Draft] = {}
        if self._speculation is not None and among is None and not is_ahead:
            self.settle()
            drafts = self._speculation.drafts(self.running, self.budget.tokens)
        if among is None and not drafts and self.decodes is not None and self._decodes_go_on(self.decodes):
            return self._plan_of(self.decodes, is_ahead)
        self.part_decodes()
        plan = StepPlan(self.budget.tokens, self.budget.beside_urgent, is_ahead=is_ahead)
        position = 0
        while plan.budget > 0:
            if among is None and not drafts and position < len(self.running):
                position += self._go_on(position, plan)
                if not plan.budget:
                    break
            if self.waiting and among is None and self._is_newcomers_turn(position):
                goes_on = self._admit_first(plan)
            elif position < len(self.running):
                sequence = self.running[position]
                is_chosen = among is None or sequence.request_id in among
                goes_on = self._continue(sequence, plan, drafts.get(sequence, ())) if is_chosen else True
            else:
                break
            if not goes_on:
                break
            position += 1
        if plan.num_tokens == len(plan.scheduled) == len(self.running) and not self._tables.has_window:
            self.decodes = plan.decodes = DecodeRows.of(plan.scheduled)
        return plan

    def _decodes_go_on(self, decodes: DecodeRows) -> bool:
        """Give all that run a block for their next token, if that is all there is to do; else nothing is changed."""
        may_admit = self.waiting and (
            len(self.running) < self._max_num_seqs or self.waiting.first.priority < self.running[-1].priority
        )
        return not may_admit and len(decodes) <= self.budget.tokens and self._tables.grow_decodes(decodes)

    def _plan_of(self, decodes: DecodeRows, is_ahead: bool) -> StepPlan:
        budget = self.budget.tokens - len(decodes)
        return StepPlan(
            budget, scheduled=decodes.scheduled, num_tokens=len(decodes), is_ahead=is_ahead, decodes=decodes
        )

    def _go_on(self, position: int, plan: StepPlan) -> int:
        """Schedule those in turn that decode, up to the first that does something else; returns how many have had it.

        The same as letting each go on by itself, in a fraction of the time: mostly they are nearly all.
        """
        limit = position + plan.budget
        if self.waiting and position < len(self.running) and self.waiting.first.priority < self.running[-1].priority:
            limit = min(limit, bisect_right(self.running, self.waiting.first.priority, key=_priority))
        return self._tables.grow_decoding(self.running[position:limit], plan)

    def _is_newcomers_turn(self, position: int) -> bool:
        return position == len(self.running) or self.waiting.first.priority < self.running[position].priority

    def _continue(self, sequence: Sequence, plan: StepPlan, draft: Draft) -> bool:
        """Let a running sequence go on; where blocks run out, the last in line gives up its own.

        False when that was the sequence itself. For its draft nobody gives up anything.
        """
        # It ends with the token that a step in flight samples.
        if not sequence.num_uncomputed_tokens or not (room := plan.room_for(sequence)):
            return True
        # Whoever was in a step that was undone may have lost its blocks, but not its seat.
        is_new = not sequence.num_computed_tokens
        if is_new:
            self._tables.attach(sequence)
        else:
            self._tables.slide(sequence)
        num_tokens = self._tables.chunk(sequence, room)
        while not self._tables.can_grow(sequence, num_tokens):
            if plan.is_ahead:
                plan.is_stuck = True
                if is_new:
                    self._tables.detach(sequence)
                return False
            victim = self.running[-1]
            self._preempt(victim, plan)
            if victim is sequence:
                return False
        draft = draft[: plan.budget - num_tokens]
        # As many blocks as the others may need in this step are left for them.
        if draft and not self._tables.can_grow(sequence, num_tokens + len(draft), num_spare=len(self.running)):
            draft = ()
        self._tables.grow(sequence, num_tokens, plan, is_new, draft)
        return True

    def _admit_first(self, plan: StepPlan) -> bool:
        """Admit the first in the queue, if need be in place of the less urgent; false when it has to wait."""
        sequence = self.waiting.first
        if not plan.admits(sequence) or not plan.room_for(sequence) or self._tables.awaits_state(sequence):
            return False
        while not self._begin(sequence, plan):
            if not self.running or self.running[-1].priority <= sequence.priority:
                return False
            if plan.is_ahead:
                plan.is_stuck = True
                return False
            self._preempt(self.running[-1], plan)
        return True

    def _begin(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Let a waiting sequence compute its next chunk; false, and nothing changed, without a seat or room for it."""
        if len(self.running) >= self._max_num_seqs:
            return False
        self._tables.attach(sequence, None if self._tables.states is None else self.waiting.second)
        if not self._tables.can_begin(sequence, plan.budget):
            self._tables.detach(sequence)
            return False
        num_tokens = self._tables.chunk(sequence, plan.room_for(sequence))
        self.waiting.remove(sequence)
        self._call_next(sequence)
        self._seat(sequence)
        if not sequence.was_admitted:
            self._note_arrival(sequence)
        self._tables.grow(sequence, num_tokens, plan, is_new=True)
        return True

    def _call_next(self, sequence: Sequence) -> None:
        """Let the next one of its request wait, once."""
        make, sequence.next_in_line = sequence.next_in_line, None
        if make is not None and (following := make()) is not None:
            self.waiting.push(following)

    def _seat(self, sequence: Sequence) -> None:
        self.part_decodes()
        if not self.running or self.running[-1].priority <= sequence.priority:
            self.running.append(sequence)
            return
        self.running.insert(bisect_right(self.running, sequence.priority, key=_priority), sequence)

    def _unseat(self, sequence: Sequence) -> None:
        self.part_decodes()
        self.running.remove(sequence)

    def part_decodes(self) -> None:
        """Let each of those that decode go on by itself."""
        self.settle()
        self.decodes = None

    def settle(self) -> None:
        """Have the sequences that decode say themselves what was counted of all of them."""
        if self.decodes is not None:
            self.decodes.settle()

    def _note_arrival(self, sequence: Sequence) -> None:
        sequence.was_admitted = True
        sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        self.expected.arrived(sequence)

    def fork(self, parent: Sequence, child: Sequence) -> list[tuple[int, int]]:
        """Start `child`, whose tokens are those that the parent has computed, from the parent's KV.

        Returns the (source, destination) pairs of blocks to be copied. Without a seat or a block for it the child
        waits, and finds what is cached when its turn comes.
        """
        child.was_admitted = True
        child.num_cached_tokens = child.num_prompt_tokens
        self.expected.arrived(child)
        if len(self.running) >= self._max_num_seqs or not self._tables.can_fork(parent):
            self.waiting.push(child)
            return []
        self._seat(child)
        return self._tables.fork(parent, child)

    def launched(self, plan: StepPlan, unread: Collection[Sequence] | None) -> None:
        """Count a step's tokens as computed, which they are for whatever is launched after it.

        `unread`: whose sampled tokens the next step may go on by before they are read; None where no step may.
        """
        plan.is_launched = True
        if self._tables.states is not None:
            self._tables.states.launched(plan)
        if plan.decodes is not None and unread is not None and len(unread) == len(plan.decodes):
            plan.decodes.advance(num_unread=1)
            return
        if plan.decodes is not None:
            plan.decodes.advance()
        else:
            for sequence, num_tokens, _, _, _ in plan.scheduled:
                sequence.num_computed_tokens += num_tokens
        if unread is None:
            return
        for sequence in unread:
            sequence.num_unread_tokens += 1
        # Somebody is sure to end.
        if len(unread) < len(plan.scheduled):
            self.part_decodes()

    def read_each(self, sampled: Iterable[tuple[Sequence, int]]) -> None:
        """As `read`, of several sequences."""
        filling = []
        for sequence, token in sampled:
            sequence.token_ids.append(token)
            if sequence.num_unread_tokens:
                sequence.num_unread_tokens -= 1
            if not len(sequence.token_ids) % sequence.block_size:
                filling.append(sequence)
        for sequence in filling:
            self._tables.publish_read(sequence)

    def read(self, sequence: Sequence, token: int) -> None:
        """Append a token that a step sampled."""
        sequence.token_ids.append(token)
        if sequence.num_unread_tokens:
            sequence.num_unread_tokens -= 1
        self._tables.publish_read(sequence)

    def verified(self, sequence: Sequence, num_draft_tokens: int, num_accepted: int, is_broken: bool) -> None:
        """Before its tokens are read: take back the guesses that were wrong; their KV is going to be overwritten.

        `is_broken`: a wrong guess has left NaNs there, which a mask lets through as 0 × NaN. So the sequence begins
        anew, and goes on without guesses.
        """
        assert self._speculation is not None
        self._speculation.verified(sequence, num_draft_tokens, num_accepted)
        if is_broken:
            sequence.speculates_up_to = 0
            self._tables.taint(sequence)
            self.start_over(sequence)
        else:
            sequence.num_computed_tokens -= num_draft_tokens - num_accepted
            self._tables.shrink(sequence)

    def read_all(self, decodes: DecodeRows, tokens: SequenceOf[int]) -> None:
        """As `read`, for a step's rows."""
        are_computed = decodes.num_unread_tokens > 0
        decodes.append(tokens)
        # What they begin next comes after the block that the step in flight fills.
        if are_computed:
            self._tables.publish_filled(decodes.sequences[row] for row in decodes.beginning)

    def complete(self, plan: StepPlan) -> None:
        """Record that a step's tokens are computed."""
        for sequence, _, _, is_new, _ in plan.scheduled if plan.decodes is None else ():
            if is_new:
                self._tables.drop_swapped(sequence)
        self.budget.step_succeeded()

    def take_back(self, plan: StepPlan, unread: Iterable[Sequence] | None) -> None:
        """As `undo`, of the step launched last; `unread`: whose tokens it was to sample.

        Sequences that have ended since own no blocks any more, and stay as they are.
        """
        for sequence in unread or ():
            sequence.num_unread_tokens -= 1
        for sequence, num_tokens, _, _, _ in plan.scheduled:
            if sequence.block_table:
                sequence.num_computed_tokens -= num_tokens
        self.undo(plan)

    def undo(self, plan: StepPlan, was_begun: bool = True) -> None:
        """Take back a step that failed: no block it was to fill can be found, nobody has more than before.

        Newcomers keep their seats, without blocks; those preempted for the step stay so. `was_begun`: the device may
        have changed sequences' states in place; then these have nothing any more.
        """
        self.part_decodes()
        states = self._tables.states
        for item in plan.scheduled:
            self._tables.forget_unwritten(item.sequence)
        broken = [] if states is None else states.undo(plan, was_begun)
        for sequence in broken:
            sequence.spares_state = True
            self._tables.detach(sequence)
        for item in plan.scheduled:
            if item.is_new:
                self._tables.detach(item.sequence)
            else:
                self._tables.shrink(item.sequence)
        for sequence, _ in plan.swapped_out:
            if sequence.swapped is not None and sequence.swapped.content is None:
                self._tables.drop_swapped(sequence)

    def start_over(self, sequence: Sequence) -> None:
        """Give up a running sequence's blocks and let it wait, its sampled tokens kept."""
        self._unseat(sequence)
        self._tables.detach(sequence)
        self.waiting.push(sequence)

    def try_alone(self, sequence: Sequence) -> None:
        """Let a running sequence, of which no step is in flight, begin anew with nothing that others have computed."""
        sequence.is_alone = True
        sequence.speculates_up_to = 0
        sequence.num_unread_tokens = 0
        self.start_over(sequence)

    def finish(self, sequence: Sequence) -> None:
        """Take a running or waiting sequence out and give up its blocks."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self._unseat(sequence)
        self.leave(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Give up the blocks of a sequence that is in no queue, and what it was expected for."""
        if not sequence.was_admitted:
            self.expected.arrived(sequence)
        self._tables.detach(sequence)
        self._tables.drop_swapped(sequence)

    def check(self) -> None:
        """Assert that every block is accounted for and owned by running sequences alone. For tests."""
        assert self.running == sorted(self.running, key=_priority), "running sequences are out of order"
        assert len(self.running) <= self._max_num_seqs, "more sequences run than there are seats"
        self._tables.check(self.running, list(self.waiting))
        if self.decodes is not None:
            assert self.decodes.sequences == self.running, "those that decode are not those that run"
            self.decodes.check()

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        self._tables.swap_out(sequence, plan)
        self.start_over(sequence)
        self.num_preemptions += 1
        plan.preempted_priority = sequence.priority


def _priority(sequence: Sequence) -> int:
    return sequence.priority
