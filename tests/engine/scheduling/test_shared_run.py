"""A prefix that several sequences begin with has one count, and is theirs until the last of them leaves."""

from array import array

from headrace.engine.kv_cache.block_hashes import hash_blocks
from headrace.engine.kv_cache.block_pool import BlockPool
from headrace.engine.kv_cache.prefix_cache import PrefixCache
from headrace.engine.kv_cache.shared_run import SharedRun
from headrace.engine.kv_cache.swap import PreemptionCosts, SwapSpace
from headrace.engine.scheduling.block_tables import BlockTables
from headrace.engine.scheduling.sequence import Sequence
from headrace.engine.scheduling.step_plan import StepPlan

BLOCK_SIZE = 4
PREFIX = list(range(6 * BLOCK_SIZE))


class Prompts:
    """Sequences that begin with some of `PREFIX`, all of whose prompts are computed in one step."""

    def __init__(self, swap_space: SwapSpace | None = None) -> None:
        self.cache = PrefixCache(BlockPool(40))
        self.tables = BlockTables(self.cache, swap_space=swap_space)
        self.running: list[Sequence] = []

    def begin(self, num_blocks: int, own: list[int]) -> Sequence:
        token_ids = array("i", PREFIX[: num_blocks * BLOCK_SIZE] + own)
        sequence = Sequence(f"{len(self.running)}", token_ids, len(token_ids), BLOCK_SIZE)
        self.tables.attach(sequence)
        self.tables.grow(sequence, sequence.num_uncomputed_tokens, StepPlan(100), is_new=True)
        sequence.num_computed_tokens = len(token_ids)
        self.running.append(sequence)
        self.check()
        return sequence

    def end(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.tables.detach(sequence)
        self.check()

    def check(self) -> None:
        self.tables.check(self.running, ())


def test_a_prompt_begins_with_a_run_whose_last_block_it_has() -> None:
    hashes = hash_blocks(PREFIX, BLOCK_SIZE)
    run = SharedRun(array("i", [7, 8, 9]), hashes[2])
    assert [run.begins(hashes[:length]) for length in (2, 3, 6)] == [False, True, True]
    assert not run.begins(hash_blocks([9, *PREFIX[1:]], BLOCK_SIZE))


def test_those_that_begin_alike_own_their_beginning_together_until_the_last_leaves() -> None:
    prompts = Prompts()
    first, *others = (prompts.begin(6, [90 + index]) for index in range(4))
    runs = {each.shared_run for each in others}
    # The first one computed it, each block for itself.
    assert first.shared_run is None
    assert [(run.blocks, run.num_owners) for run in runs if run is not None] == [(first.block_table[:6], 3)]
    num_available = prompts.cache.num_available
    for sequence in (first, *others):
        assert list(prompts.cache.match(hash_blocks(PREFIX, BLOCK_SIZE))) == list(others[-1].block_table[:6])
        prompts.end(sequence)
    assert prompts.cache.num_available == num_available + 6 + 4
    assert len(prompts.cache.match(hash_blocks(PREFIX, BLOCK_SIZE))) == 6
    # Who comes then is the first again: nobody takes the blocks that it owns.
    again, other = prompts.begin(6, [95]), prompts.begin(0, [96] * 33 * BLOCK_SIZE)
    assert not set(other.block_table) & set(again.block_table)


def test_a_run_is_of_use_to_those_that_it_is_most_of() -> None:
    prompts = Prompts()
    prompts.begin(6, [90])
    short, longer, longest = (prompts.begin(length, [91]) for length in (2, 4, 6))
    # Four blocks: two of the run's and two others. Six: a run of their own, of which those after it begin.
    assert [len(each.shared_run or ()) for each in (short, longer, longest)] == [2, 2, 6]
    assert longer.shared_run is short.shared_run
    like_the_longest = prompts.begin(6, [92])
    assert like_the_longest.shared_run is longest.shared_run
    for sequence in (short, longest, longer, like_the_longest):
        prompts.end(sequence)


def test_what_is_forgotten_is_not_found_as_part_of_a_run() -> None:
    prompts = Prompts()
    sequences = [prompts.begin(6, [90 + index]) for index in range(3)]
    prompts.cache.forget(sequences[0].block_table[3])
    assert list(prompts.cache.match(hash_blocks(PREFIX, BLOCK_SIZE))) == list(sequences[0].block_table[:3])
    prompts.begin(6, [95])
    for sequence in list(prompts.running):
        prompts.end(sequence)


def test_the_host_keeps_nothing_of_what_others_own_in_the_same_run() -> None:
    costs = PreemptionCosts(seconds_per_token=1.0, seconds_per_byte=0.0, seconds_per_swap=0.0)
    prompts = Prompts(SwapSpace(num_blocks=40, block_bytes=1, costs=costs))
    first = prompts.begin(6, [90])
    second, third = prompts.begin(6, [91] * 9), prompts.begin(6, [92] * 9)
    prompts.end(first)
    prompts.tables.swap_out(second, StepPlan(100))
    assert second.swapped is not None
    assert (second.swapped.first_block, second.swapped.num_blocks) == (6, 3)
    prompts.check()
    # It is the last one of the run: what it gives up nobody has.
    prompts.tables.drop_swapped(second)
    prompts.end(second)
    prompts.tables.swap_out(third, StepPlan(100))
    assert third.swapped is not None
    assert (third.swapped.first_block, third.swapped.num_blocks) == (0, 9)
    prompts.check()
