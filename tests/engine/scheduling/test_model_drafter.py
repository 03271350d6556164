"""What a second model has left in a block is used for what it is, and for nothing else."""

from array import array
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import pytest

from headrace.engine.scheduling.model_drafter import ModelDrafter
from headrace.engine.scheduling.sequence import Sequence
from headrace.engine.scheduling.step_plan import StepPlan

BLOCK_SIZE = 4
# Two full blocks and a token.
PROMPT = list(range(9))


def sequence(name: str, token_ids: SequenceOf[int], blocks: SequenceOf[int]) -> Sequence:
    return Sequence(
        name,
        array("i", token_ids),
        1,
        block_size=BLOCK_SIZE,
        block_table=array("i", blocks),
        num_computed_tokens=len(token_ids) - 1,
    )


def guess(drafter: ModelDrafter, guessing: Sequence, number: int) -> int:
    """Begin a step with so many guesses; returns the first token that is computed for them."""
    plan = StepPlan(budget=20)
    plan.schedule(guessing, 1, is_new=False, draft=(0,) * number)
    (work,) = drafter.begin(plan)
    return work.start


def guesses_into_the_second_block(drafter: ModelDrafter) -> None:
    guess(drafter, sequence("other", PROMPT[4:8], [8, 6]), 3)


def begins_the_second_block(drafter: ModelDrafter) -> None:
    lagging = sequence("other", PROMPT[::-1], [8, 6, 9])
    assert not drafter.drafts({lagging: 1}, budget=6)
    (work,) = drafter.begin(StepPlan(budget=20))
    assert (work.start, work.end) == (0, 6)


def fails(drafter: ModelDrafter) -> None:
    plan = StepPlan(budget=20)
    plan.schedule(sequence("other", PROMPT[:5], [5, 9]), 1, is_new=False, draft=(0,))
    drafter.give_up(drafter.begin(plan))


@pytest.mark.parametrize(
    ("happens", "start"),
    [(lambda _: None, 8), (guesses_into_the_second_block, 4), (begins_the_second_block, 4), (fails, 0)],
    ids=["nothing", "guesses", "a lagging one", "a failure"],
)
def test_who_has_a_block_next_finds_only_what_is_still_there(happens: Callable[[ModelDrafter], None], start: int):
    drafter = ModelDrafter(longest=100)
    assert guess(drafter, sequence("one", PROMPT, [5, 6, 7]), 2) == 0
    happens(drafter)
    assert guess(drafter, sequence("the same again", PROMPT, [5, 6, 7]), 2) == start
