"""Of a model with states: a conversation's next turn goes on near the end of the last one, at no job's cost."""

from dataclasses import replace
from functools import partial

import pytest

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.request import Request

from ..fakes import VOCAB_SIZE, FakeRunner, fake_answer, fake_engine
from ..running import greedy_params, run_all, token_ids

BLOCK_SIZE, CONTEXT = 8, 1000
NUM_ANSWERED = 20
turn = partial(Request, params=greedy_params(NUM_ANSWERED), is_conversation=True)


def new_engine(num_states: int = 20, **options) -> Engine:
    config = EngineConfig(block_size=BLOCK_SIZE, **options)
    return fake_engine(FakeRunner(500, BLOCK_SIZE, num_states=num_states), config, CONTEXT)


def said(seed: int, length: int) -> list[int]:
    return [1 + (place * place + seed * (place // 3)) % (VOCAB_SIZE - 1) for place in range(length)]


def num_computed(engine: Engine, request: Request) -> int:
    """How many tokens of its prompt, and of others', were computed until its answer was complete."""
    before = engine.stats.num_computed_tokens
    events = run_all(engine, [request])[request.request_id]
    assert token_ids(events) == fake_answer(request, CONTEXT)
    return engine.stats.num_computed_tokens - before - (len(token_ids(events)) - 1)


@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["", "one-step-ahead"])
@pytest.mark.parametrize("opening", [[], [8, 9], [8, 7, 9, 7]], ids=["nothing", "two-tokens", "four-tokens"])
def test_each_turn_computes_what_is_new(opening, is_asynchronous):
    """`opening`: what a template has a prompt end with, and leaves out of the next turn's, as Qwen3.5's."""
    engine, history = new_engine(async_scheduling=is_asynchronous), said(0, 100)
    for number in range(5):
        prompt = history + said(number + 1, 70)
        request = turn(str(number), prompt + opening)
        # The answer before it is new too: it is computed again, in one step.
        most_new = len(prompt) + len(opening) if not number else NUM_ANSWERED + 70 + len(opening)
        assert num_computed(engine, request) <= most_new + len(opening) + 8 + BLOCK_SIZE
        history = prompt + fake_answer(request, CONTEXT)


def test_turns_of_which_somebody_asks_for_another_one():
    """The same question again, and another one in its place."""
    engine, asked = new_engine(), said(1, 100)
    first = turn("0", asked)
    run_all(engine, [first])
    history = asked + fake_answer(first, CONTEXT)
    for name, question in (("1", said(2, 50)), ("2", said(2, 50)), ("3", said(3, 50))):
        assert num_computed(engine, turn(name, history + question)) <= NUM_ANSWERED + 50 + 8 + BLOCK_SIZE


def test_of_short_turns_not_each_has_a_state():
    """Where 32 tokens have come together there is another one."""
    engine, history = new_engine(), said(0, 100)
    computed = []
    for number in range(20):
        history = history + said(number, 6)
        computed.append(num_computed(engine, replace(turn(str(number), history), params=greedy_params(2))))
        history = [*history, 5, 5]
    assert max(computed[1:]) <= 32 + 8 + 8 + 2 * BLOCK_SIZE


def test_whoever_resumes_keeps_the_same_state():
    """Its answer's first half is known: the state is that of the prompt's end all the same."""
    engine, asked = new_engine(), said(1, 100)
    answer = fake_answer(turn("0", asked), CONTEXT)
    run_all(engine, [replace(turn("0", asked), resume_token_ids=answer[:10])])
    assert num_computed(engine, turn("1", asked + said(9, 40))) <= 40 + 8 + BLOCK_SIZE


def test_a_jobs_rows_take_no_step_more():
    """Each prompt in one step, as before; a conversation's in two."""
    params = greedy_params(1)
    for is_conversation, num_steps in ((False, 1), (True, 2)):
        engine = new_engine()
        run_all(engine, [Request("0", said(1, 100), params, is_conversation=is_conversation)])
        assert (engine.stats.num_steps, engine.stats.num_computed_tokens) == (num_steps, 100)


def test_a_state_that_an_announced_request_waits_for_is_given_up_last():
    """Of four states conversations would have all by the time that the next row comes."""
    engine, shared = new_engine(num_states=4), said(1, 96)
    engine.expect_prefix(shared, 2)
    run_all(engine, [Request("row 0", shared + said(2, 40), greedy_params(1))])
    for number in range(6):
        run_all(engine, [turn(str(number), said(number + 10, 60))])
    assert num_computed(engine, Request("row 1", shared + said(3, 40), greedy_params(1))) == 40
    # Nobody is to come any more: now it is the one that was not used for the longest time.
    for number in range(6):
        run_all(engine, [turn(str(number), said(number + 20, 60))])
    assert num_computed(engine, Request("row 2", shared + said(4, 40), greedy_params(1))) == 96 + 40
