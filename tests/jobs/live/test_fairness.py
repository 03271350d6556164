"""Who is next: shares by weight, bounded lags, nothing saved up, nothing lost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.jobs.live.fairness import FairQueue
from headrace.jobs.live.requests import LiveRequest
from headrace.jobs.live.turns import Turns
from headrace.jobs.spec.sampling import SamplingSpec

TENANTS = st.sampled_from("abc")
COSTS = st.integers(1, 1000)
WEIGHTS = {"a": 1.0, "b": 2.0, "c": 5.0}


def add(queue: FairQueue[tuple[str, int, int]], tenant: str, number: int, cost: int) -> None:
    queue.add((tenant, number, cost), tenant, cost, WEIGHTS[tenant])


@settings(deadline=None)
@given(st.lists(st.tuples(TENANTS, COSTS), max_size=60), st.integers(0, 60))
def test_between_two_that_wait_the_difference_is_a_request_of_each(asked: list[tuple[str, int]], served: int) -> None:
    queue: FairQueue[tuple[str, int, int]] = FairQueue()
    for number, (tenant, cost) in enumerate(asked):
        add(queue, tenant, number, cost)
    left = {tenant: sum(name == tenant for name, _ in asked) for tenant in WEIGHTS}
    got = dict.fromkeys(WEIGHTS, 0.0)
    largest = {tenant: max([cost for name, cost in asked if name == tenant], default=0) for tenant in WEIGHTS}
    waiting = [tenant for tenant in WEIGHTS if left[tenant]]
    for _ in range(min(served, len(asked))):
        tenant, _, cost = queue.pop()
        left[tenant] -= 1
        got[tenant] += cost / WEIGHTS[tenant]
        waiting = [tenant for tenant in waiting if left[tenant]]
        for one in waiting:
            for other in waiting:
                bound = largest[one] / WEIGHTS[one] + largest[other] / WEIGHTS[other]
                assert abs(got[one] - got[other]) <= bound + 1e-6


@settings(deadline=None)
@given(st.lists(st.one_of(st.tuples(TENANTS, COSTS), st.sampled_from(["pop", "remove"])), max_size=80), st.data())
def test_each_item_comes_out_once_in_the_order_of_its_tenant(steps: list, data: st.DataObject) -> None:
    queue: FairQueue[tuple[str, int, int]] = FairQueue()
    waiting: list[tuple[str, int, int]] = []
    for number, step in enumerate(steps):
        if isinstance(step, tuple):
            add(queue, step[0], number, step[1])
            waiting.append((step[0], number, step[1]))
        elif not waiting:
            with pytest.raises(IndexError):
                queue.pop()
        elif step == "pop":
            item = queue.pop()
            assert item == next(other for other in waiting if other[0] == item[0])
            waiting.remove(item)
        else:
            item = data.draw(st.sampled_from(waiting))
            assert queue.remove(item)
            assert not queue.remove(item)
            waiting.remove(item)
        assert len(queue) == len(waiting)
    assert sorted(queue.pop() for _ in range(len(queue))) == sorted(waiting)


@given(st.integers(0, 50), st.lists(COSTS, min_size=1, max_size=50))
def test_one_request_waits_for_nobodys_flood(served: int, flood: list[int]) -> None:
    queue: FairQueue[tuple[str, int, int]] = FairQueue()
    for number, cost in enumerate(flood):
        add(queue, "a", number, cost)
    for _ in range(min(served, len(flood) - 1)):
        queue.pop()
    add(queue, "b", 99, 10**6)
    # At most the request of the flood that is at the same point of its tenant's clock is before it.
    assert ("b", 99, 10**6) in (queue.pop(), queue.pop())


def test_nothing_is_saved_up_in_a_pause() -> None:
    queue: FairQueue[tuple[str, int, int]] = FairQueue()
    add(queue, "b", 0, 10)
    queue.pop()
    for number in range(50):
        add(queue, "a", number, 10)
        queue.pop()
    for number in range(50, 60):
        add(queue, "a", number, 10)
        add(queue, "b", number, 20)
    # Twice the weight and twice the cost: they take turns, as if b had been there all the time.
    order = "".join(queue.pop()[0] for _ in range(20))
    assert order in ("ab" * 10, "ba" * 10)


def request(tenant: str, n: int = 1) -> LiveRequest:
    sampling = SamplingSpec(n=n, max_tokens=8, temperature=1.0)
    return LiveRequest.new(queue="q", model="m", prompt_token_ids=[1, 2], sampling=sampling, tenant=tenant)


def test_the_engine_gets_as_many_as_it_runs_and_the_rest_by_turns() -> None:
    started: list[str] = []
    turns: Turns[str] = Turns(2, started.append)
    for number in range(6):
        turns.enter(f"flood-{number}", request("flood"))
    assert started == ["flood-0", "flood-1"]
    turns.enter("one", request("other"))
    assert len(started) == 2
    turns.leave("flood-1")
    assert started[2:] == ["one"]
    turns.leave("flood-1")
    # One that is called off while it waits makes no room.
    turns.leave("flood-2")
    assert len(started) == 3
    turns.leave("one")
    turns.leave("flood-0")
    assert started[3:] == ["flood-3", "flood-4"]


def test_a_request_of_many_samples_is_let_in_too() -> None:
    started: list[str] = []
    turns: Turns[str] = Turns(2, started.append)
    turns.enter("many", request("a", n=5))
    turns.enter("next", request("a"))
    assert started == ["many"]
    turns.leave("many")
    assert started == ["many", "next"]
