"""Who may answer a request: one attempt at a time, and another when that one is gone."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from redis import Redis

from headrace.jobs.errors import LaterVersion
from headrace.jobs.live.claims import LeaseState, LiveClaims
from headrace.jobs.live.keys import request_key
from headrace.jobs.live.requests import LiveRequest, LiveState, UnknownRequest, new_request_id

from .desk import LONG, PROMPT, TTL_SECONDS, Desk, claim_one

OVER = 0.0


@pytest.fixture
def claims_of(desk) -> Iterator[Callable[..., LiveClaims]]:
    with ExitStack() as stack:

        def make(owner: str, lease_seconds: float = LONG) -> LiveClaims:
            return stack.enter_context(LiveClaims(desk.url, desk.app, desk.queue, owner, lease_seconds, TTL_SECONDS))

        yield make


def state(desk: Desk, request: LiveRequest) -> LiveState:
    return desk.requests.get(request.id).state


def lose_bells(desk: Desk) -> None:
    with Redis.from_url(desk.url) as redis:
        assert redis.delete(desk.queue) == 1


def test_one_of_two_gets_it(desk, claims_of):
    request = desk.submitted()
    first, second = claims_of("one"), claims_of("two")
    claim = claim_one(first, request.id)
    assert claim is not None
    assert (claim.request, claim.attempt, claim.num_crashes, claim.num_failures) == (request, 1, 0, 0)
    assert 0 < claim.seconds_left <= LONG + 1
    assert claim_one(second, request.id) is None
    assert claim_one(first, request.id) is None
    record = desk.requests.get(request.id)
    assert (record.state, record.owner, record.attempt) == (LiveState.RUNNING, "one", 1)


def test_many_are_claimed_at_once(desk, claims_of):
    waiting, taken, ended, called_off = requests = [desk.request(PROMPT) for _ in range(4)]
    desk.requests.submit(*requests)
    first, second = claims_of("one"), claims_of("two")
    assert claim_one(second, taken.id).request == taken
    second.end([claim_one(second, ended.id)])
    desk.requests.cancel(called_off.id)
    found = first.claim_all([*(each.id for each in requests), new_request_id()])
    assert [(claim.request, claim.is_cancelled) for claim in found] == [(waiting, False), (called_off, True)]
    assert first.renew(found) == [LeaseState.HELD, LeaseState.CANCELLED]


def test_of_a_burst_no_more_are_taken_than_may_be_open(desk):
    groups = [[desk.request(PROMPT) for _ in range(size)] for size in (1, 2, 70, 1, 1)]
    with ThreadPoolExecutor(4) as pool:
        new = [[[desk.request(PROMPT)] for _ in range(5)] for _ in range(4)]
        bursts = pool.map(lambda requests: desk.requests.register(requests, 8), new)
    assert sum(map(sum, bursts)) == desk.requests.num_unanswered(desk.queue) == 8
    assert desk.requests.register(groups, 11) == [True, True, False, False, False]
    assert desk.requests.num_unanswered(desk.queue) == 11
    # Sent again where its answer was lost on the way.
    assert desk.requests.register(groups[1:2], 11) == [True]
    for request in (each for group in groups[2:] for each in group):
        with pytest.raises(UnknownRequest):
            desk.requests.get(request.id)


def test_a_group_beyond_the_limit_is_taken_alone(desk):
    groups = [[desk.request(PROMPT) for _ in range(70)], [desk.request(PROMPT)]]
    assert desk.requests.register(groups, 2) == [True, False]
    assert desk.requests.num_unanswered(desk.queue) == 70


def test_submitting_again_changes_nothing(desk, claims_of):
    request = desk.submitted()
    assert claim_one(claims_of("one"), request.id) is not None
    desk.requests.submit(request)
    assert state(desk, request) is LiveState.RUNNING
    assert claim_one(claims_of("two"), request.id) is None


def test_an_expired_lease_is_a_crash(desk, claims_of):
    request = desk.submitted()
    claim_one(claims_of("one", OVER), request.id)
    claim = claim_one(claims_of("two"), request.id)
    assert claim is not None
    assert (claim.attempt, claim.num_crashes) == (2, 1)


def test_what_only_waited_in_a_dead_worker_is_no_crash(desk, claims_of):
    dead, other = claims_of("dead", OVER), claims_of("other", OVER)
    swept, claimed, begun = requests = [desk.submitted() for _ in range(3)]
    held = [claim_one(dead, request.id) for request in requests]
    assert dead.renew(held, {request.id for request in requests}) == [LeaseState.HELD] * 3
    dead.begin(held[2])
    assert claim_one(other, claimed.id).num_crashes == 0
    assert sorted(other.sweep(LONG)) == sorted(request.id for request in requests)
    # Taken for dead too early, as long as nobody has what it held: that makes up for nothing.
    assert dead.renew(held[:1], {swept.id}) == [LeaseState.HELD]
    assert claim_one(other, swept.id).num_crashes == 0
    assert claim_one(other, begun.id).num_crashes == 1
    # The next attempt may be to blame again.
    assert claim_one(dead, swept.id).num_crashes == 1


def test_what_was_lost_is_not_renewed_and_not_ended(desk, claims_of):
    request = desk.submitted()
    first, second = claims_of("one", OVER), claims_of("two")
    lost = claim_one(first, request.id)
    held = claim_one(second, request.id)
    assert first.renew([lost]) == [LeaseState.LOST]
    assert second.renew([held]) == [LeaseState.HELD]
    first.end([lost])
    assert not first.release(lost, has_failed=False)
    assert state(desk, request) is LiveState.RUNNING
    second.end([held])
    assert state(desk, request) is LiveState.ENDED
    assert claim_one(second, request.id) is None


def test_a_late_renewal_is_no_crash(desk, claims_of):
    """The sweeper was faster, but nobody has taken the request: its worker was only slow."""
    request = desk.submitted()
    slow = claims_of("slow", OVER)
    claim = claim_one(slow, request.id)
    assert claims_of("other").sweep(LONG) == [request.id]
    assert state(desk, request) is LiveState.QUEUED
    assert slow.renew([claim]) == [LeaseState.HELD]
    taken = claim_one(claims_of("other"), request.id)
    assert taken is not None
    assert taken.num_crashes == 1


def test_a_worker_that_takes_its_own_again_has_not_crashed(desk, claims_of):
    """It was starved for longer than the lease, and its sweeper or its bell came before its renewal."""
    swept, rung = desk.submitted(), desk.submitted()
    starved = claims_of("starved", OVER)
    for _ in range(3):
        held = [claim_one(starved, request.id) for request in (swept, rung)]
        starved.sweep(LONG)
        assert starved.renew(held[:1]) == [LeaseState.HELD]
    assert [claim.num_crashes for claim in held] == [0, 0]
    other = claims_of("other", OVER)
    assert [claim_one(other, request.id).num_crashes for request in (swept, rung)] == [1, 0]


def test_a_request_that_a_worker_cannot_read_is_left_to_others(desk, claims_of, caplog):
    """Of a later version: were its leases to run out, they would count as crashes, for which others refuse it."""
    later, other = requests = [desk.request(PROMPT) for _ in range(2)]
    desk.requests.submit(*requests)
    lose_bells(desk)
    with Redis.from_url(desk.url, decode_responses=True) as redis:
        spec = redis.hget(request_key(later.id), "spec")
        redis.hset(request_key(later.id), "spec", spec.replace("{", '{"beams":4,', 1))
        earlier = claims_of("earlier", OVER)
        for _ in range(3):
            assert [claim.request for claim in earlier.claim_all([later.id, other.id])] == [other]
            assert redis.hget(request_key(later.id), "state") == LiveState.QUEUED
            assert later.id in claims_of("sweeper").sweep(OVER)
        redis.hset(request_key(later.id), "spec", spec)
    assert (caplog.text.count("left to other workers"), caplog.text.count("beams")) == (1, 1)
    claim = claim_one(claims_of("upgraded"), later.id)
    assert (claim.request, claim.attempt, claim.num_crashes, claim.num_failures) == (later, 4, 0, 0)


def test_what_only_earlier_workers_hear_is_not_rung_for_past_its_deadline(desk, claims_of):
    unread, unheard = requests = [desk.request(timeout_seconds=-1.0) for _ in range(2)]
    desk.requests.submit(*requests)
    lose_bells(desk)
    claims = claims_of("earlier", OVER)
    with Redis.from_url(desk.url, decode_responses=True) as redis:
        spec = redis.hget(request_key(unread.id), "spec")
        redis.hset(request_key(unread.id), "spec", spec.replace("{", '{"beams":4,', 1))
    assert sorted(claims.sweep(OVER)) == sorted(request.id for request in requests)
    assert claim_one(claims, unread.id) is None
    for _ in range(2):
        # Who has lost a bell is to hear that its deadline has passed.
        assert claims.sweep(OVER) == [unheard.id]
    assert desk.requests.num_waiting(desk.queue) == 1
    with pytest.raises(LaterVersion, match=r"the request is of a later headrace \(beams: .*: upgrade this one"):
        desk.requests.get(unread.id)


def test_what_is_handed_back_is_waiting_again(desk, claims_of):
    request = desk.submitted()
    claims = claims_of("one")
    assert claims.release(claim_one(claims, request.id), has_failed=False)
    assert desk.requests.num_waiting(desk.queue) == 1
    again = claim_one(claims, request.id)
    assert (again.attempt, again.num_crashes, again.num_failures) == (2, 0, 0)
    assert claims.release(again, has_failed=True)
    assert claim_one(claims, request.id).num_failures == 1


def test_a_lost_bell_is_rung_again_once(desk, claims_of):
    request = desk.submitted()
    claims = claims_of("one")
    assert claims.sweep(OVER) == []
    lose_bells(desk)
    assert claims.sweep(LONG) == []
    assert claims.sweep(OVER) == [request.id]
    # Everyone who looks now sees that somebody rang a moment ago.
    assert claims.sweep(LONG) == []


def test_what_runs_or_has_ended_is_not_swept(desk, claims_of):
    running, ended = desk.submitted(), desk.submitted()
    claims = claims_of("one")
    claim_one(claims, running.id)
    claims.end([claim_one(claims, ended.id)])
    lose_bells(desk)
    assert claims.sweep(OVER) == []


def test_cancelling(desk, claims_of):
    waiting, running, ended = desk.submitted(), desk.submitted(), desk.submitted()
    claims = claims_of("one")
    held = claim_one(claims, running.id)
    claims.end([claim_one(claims, ended.id)])
    assert [desk.requests.cancel(each.id) for each in (waiting, running, ended)] == [True, True, False]
    assert not desk.requests.cancel(new_request_id())
    assert claim_one(claims, waiting.id).is_cancelled
    assert claims.renew([held]) == [LeaseState.CANCELLED]
    assert desk.requests.get(running.id).is_cancelled


def test_of_what_has_ended_no_images_are_kept(desk, claims_of):
    claims, (asked, other) = claims_of("one"), [desk.submitted(images=[b"many bytes"]) for _ in range(2)]
    claim, _ = claims.claim_all([asked.id, other.id])
    assert claim.request.image_files == (b"many bytes",)
    claims.end([claim])
    record = desk.requests.get(asked.id)
    assert (record.state, record.request) == (LiveState.ENDED, asked.model_copy(update={"images": ()}))
    assert desk.requests.get(other.id).request == other


def test_tenants_are_counted_apart(desk, claims_of):
    mine, theirs = f"{desk.queue}-a", f"{desk.queue}-b"
    requests = [desk.submitted(tenant=tenant) for tenant in (mine, mine, theirs)]
    overdue = desk.submitted(tenant=mine, timeout_seconds=-1)
    assert (desk.requests.num_open(mine), desk.requests.num_open(theirs)) == (2, 1)
    claims = claims_of("one")
    claims.end([claim_one(claims, requests[0].id)])
    desk.requests.cancel(requests[1].id)
    assert (desk.requests.num_open(mine), desk.requests.num_open(theirs)) == (0, 1)
    assert desk.requests.get(overdue.id).request == overdue


def test_what_redis_forgot_is_restored(desk, claims_of):
    request = desk.submitted()
    claims = claims_of("one")
    claim = claim_one(claims, request.id)
    with Redis.from_url(desk.url) as redis:
        redis.delete(request_key(request.id))
    with pytest.raises(UnknownRequest, match=request.id):
        desk.requests.get(request.id)
    assert claims.renew([claim]) == [LeaseState.GONE]
    claims.restore(claim)
    assert claims.renew([claim]) == [LeaseState.HELD]
    assert desk.requests.get(request.id).request == request


def test_no_key_stays_for_ever(desk, claims_of):
    with Redis.from_url(desk.url) as redis:
        # Other tests' workers keep theirs for longer.
        redis.flushdb()
        claims = claims_of("one")
        for _ in range(2):
            request = desk.submitted()
            claim_one(claims, request.id)
        claims.end([claim_one(claims, desk.submitted().id)])
        keys = list(redis.scan_iter("headrace:live:*"))
        assert len(keys) >= 5
        assert all(0 < redis.ttl(key) <= LONG + TTL_SECONDS + 1 for key in keys)
