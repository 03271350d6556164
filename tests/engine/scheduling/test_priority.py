"""Lower priority values are served first, and take what they need from the others."""

import pytest
from torch import Tensor

from headrace.engine import engine as engine_module
from headrace.engine.engine import Engine
from headrace.engine.errors import InvalidRequestError
from headrace.engine.execution.batch import Batch
from headrace.engine.request import Request
from headrace.engine.scheduling.token_budget import TokenBudget

from ..fakes import fake_answer, make_engine
from ..running import greedy_params, token_ids

PREFIX = [token % 10 + 1 for token in range(40)]
URGENT, BULK = -1, 0


def steps_of(engine: Engine) -> dict[str, list[int]]:
    """Runs to the end; at which steps each request got a token."""
    steps: dict[str, list[int]] = {}
    step = 0
    while engine.has_work:
        for event in engine.step():
            steps.setdefault(event.request_id, []).append(step)
        engine.check()
        step += 1
    return steps


def test_the_urgent_are_admitted_first_and_of_equals_the_earlier():
    engine, _ = make_engine(max_num_seqs=1)
    for name, priority in (("c", 1), ("b", 0), ("b2", 0), ("a", -5)):
        engine.add(Request(name, PREFIX[:5], greedy_params(2), priority=priority))
    assert list(steps_of(engine)) == ["a", "b", "b2", "c"]


def test_an_urgent_request_takes_a_seat():
    engine, _ = make_engine(max_num_seqs=2)
    for name in ("bulk1", "bulk2"):
        engine.add(Request(name, PREFIX[:5], greedy_params(10), priority=BULK))
    engine.step()
    engine.add(Request("urgent", PREFIX[7:], greedy_params(10), priority=URGENT))
    steps = steps_of(engine)
    assert steps["urgent"] == list(range(10))
    assert steps["bulk1"] == list(range(9))
    assert steps["bulk2"][0] == 9
    assert engine.stats.num_preemptions == 1


def test_an_urgent_request_takes_blocks():
    """Six blocks: bulk holds four of them, five are wanted."""
    engine, _ = make_engine(num_blocks=6)
    bulk = [Request(str(index), PREFIX[index : index + 14], greedy_params(20), priority=BULK) for index in range(2)]
    for request in bulk:
        engine.add(request)
    events = engine.step()
    engine.add(Request("urgent", PREFIX[3:], greedy_params(4), priority=URGENT))
    steps = []
    while engine.has_work:
        new = engine.step()
        steps.append({event.request_id for event in new})
        events += new
        engine.check()
    assert steps[:4] == [{"urgent"}] * 4
    for request in bulk:
        answer = token_ids([event for event in events if event.request_id == request.request_id])
        assert answer == fake_answer(request, engine.max_model_len)


def test_the_urgent_have_the_budget_before_bulk():
    """Bulk that decodes goes on only with the tokens that an urgent prefill leaves."""
    engine, _ = make_engine(max_num_batched_tokens=10, max_num_seqs=8)
    for name in ("bulk1", "bulk2"):
        engine.add(Request(name, PREFIX[:5], greedy_params(10), priority=BULK))
    engine.step()
    engine.add(Request("urgent", [10, *PREFIX[:38]], greedy_params(3), priority=URGENT))
    first = [{event.request_id for event in engine.step()} for _ in range(4)]
    # 39 tokens of prefill, ten a step, leave one for a decode in the fourth.
    assert first == [set(), set(), set(), {"urgent", "bulk1"}]
    assert engine.stats.num_preemptions == 0


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The engine's time, in seconds, which the test sets."""
    now = [0.0]
    monkeypatch.setattr(engine_module, "perf_counter", lambda: now[0])
    return now


def test_prompts_of_bulk_are_cut_beside_the_urgent(clock, monkeypatch):
    """At 500 tokens a second a tenth of a second of them is 50, of a budget of 200."""
    engine, runner = make_engine(num_blocks=200, max_num_batched_tokens=200, max_num_seqs=64)
    sizes: list[int] = []
    execute = runner.execute

    def execute_for_a_while(batch: Batch) -> Tensor:
        sizes.append(len(batch.token_ids))
        clock[0] += 0.002 * sizes[-1]
        return execute(batch)

    monkeypatch.setattr(runner, "execute", execute_for_a_while)
    prompts = [[1 + row % 9, 1 + row // 9, *PREFIX] for row in range(30)]
    bulk = [Request(str(row), prompt, greedy_params(1), priority=BULK) for row, prompt in enumerate(prompts)]
    for request in bulk:
        engine.add(request)
    events = engine.step()
    num_before = len(sizes)
    engine.add(Request("urgent", PREFIX[7:], greedy_params(6), priority=URGENT))
    while engine.has_work:
        events += engine.step()
        engine.check()
    assert sizes[:num_before] == [200]
    assert sizes[num_before : num_before + 6] == [33 + 50, *[1 + 50] * 5]
    assert sizes[num_before + 6] == 200
    for request in bulk:
        answer = token_ids([event for event in events if event.request_id == request.request_id])
        assert answer == fake_answer(request, engine.max_model_len)


def test_what_fits_beside_the_urgent_is_learned_from_prompts():
    budget = TokenBudget(2048)
    assert budget.beside_urgent == 2048
    budget.took(1.0, num_tokens=2000, num_sequences=10)
    assert budget.beside_urgent == 200
    budget.took(0.1, num_tokens=400, num_sequences=100)
    assert budget.beside_urgent == 300
    for _ in range(3):
        budget.took(1.0, num_tokens=256, num_sequences=256)
    assert budget.beside_urgent == 300
    for _ in range(20):
        budget.took(60.0, num_tokens=100, num_sequences=1)
    assert budget.beside_urgent == 32
    for _ in range(20):
        budget.took(0.001, num_tokens=2000, num_sequences=1)
    assert budget.beside_urgent == 2048


@pytest.mark.parametrize("priority", [0.5, "high", None])
def test_a_priority_that_is_no_whole_number_is_refused(priority):
    engine, _ = make_engine()
    with pytest.raises(InvalidRequestError, match="priority must be a whole number"):
        engine.add(Request("a", [1], priority=priority))
