"""Which shard `claim_next` gives to whom, on both databases."""

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random

import pytest
from sqlalchemy import insert, update

from headrace.storage.errors import JobEnded, UnknownJob
from headrace.storage.ledger import leases
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import Claim, NewJob, NewShard, ShardState
from headrace.storage.ledger.tables import shards, tenants

from .claiming import CreateJob

CreateAs = Callable[..., str]


@pytest.fixture(autouse=True)
def long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has failed is not due again by itself, however slow the machine."""
    monkeypatch.setattr(leases, "_FIRST_PAUSE_SECONDS", 3600.0)
    monkeypatch.setattr(leases, "_LONGEST_PAUSE_SECONDS", 3600.0)


@pytest.fixture
def create_as(ledger: Ledger) -> CreateAs:
    """Records a job of some tenant, with some priority."""

    def create(job_id: str, num_shards: int, tenant: str = "default", priority: int = 0, queue: str = "bulk") -> str:
        job = NewJob(job_id, queue, "tiny", "/out", "f", 2 * num_shards, tenant=tenant, priority=priority)
        ledger.create_job(job, [NewShard(number, 2, "/spool") for number in range(num_shards)])
        return job_id

    return create


def weigh(ledger: Ledger, **weights: int) -> None:
    rows = [{"name": name, "weight": weight, "created_at": 0.0} for name, weight in weights.items()]
    with ledger.database.write() as connection:
        connection.execute(insert(tenants), rows)


@dataclass
class Walker:
    """A worker that claims and remembers, as `ShardRunner` does."""

    ledger: Ledger
    owner: str = "worker"
    after: dict[str, int] = field(default_factory=dict)

    def claim(self) -> Claim | None:
        claim = self.ledger.leases.claim_next("bulk", self.owner, 60, self.after)
        if claim is not None:
            self.after[claim.job_id] = claim.shard_number
        return claim

    def take(self) -> Claim:
        claim = self.claim()
        assert claim is not None
        return claim


def jobs_taken(ledger: Ledger, count: int) -> list[str]:
    return [Walker(ledger).take().job_id for _ in range(count)]


def test_the_highest_priority_comes_first_then_the_oldest_job(ledger: Ledger, create_as: CreateAs) -> None:
    create_as("old", 2)
    create_as("urgent", 2, priority=5)
    create_as("new", 1)
    create_as("idle", 1, priority=-1)
    assert jobs_taken(ledger, 6) == ["urgent", "urgent", "old", "old", "new", "idle"]
    assert Walker(ledger).claim() is None


def test_a_priority_can_be_changed_until_the_job_ends(ledger: Ledger, create_job: CreateJob) -> None:
    create_job("job-1")
    create_job("job-2")
    ledger.set_priority("job-2", 3)
    assert (ledger.job("job-1").priority, ledger.job("job-2").priority) == (0, 3)
    assert jobs_taken(ledger, 1) == ["job-2"]
    ledger.cancel_job("job-2")
    with pytest.raises(JobEnded):
        ledger.set_priority("job-2", 4)
    with pytest.raises(UnknownJob):
        ledger.set_priority("nope", 4)


def test_tenants_take_turns_by_their_weights_whoever_came_first(ledger: Ledger, create_as: CreateAs) -> None:
    weigh(ledger, big=3, small=1)
    create_as("big-1", 20, tenant="big")
    create_as("big-2", 20, tenant="big")
    create_as("small-1", 20, tenant="small")
    create_as("without-a-row", 20, tenant="without")
    assert Counter(jobs_taken(ledger, 15)) == {"big-1": 9, "small-1": 3, "without-a-row": 3}


def test_a_shard_that_is_done_counts_for_nobody(ledger: Ledger, create_as: CreateAs) -> None:
    create_as("a-1", 20, tenant="a")
    create_as("b-1", 20, tenant="b")
    for _ in range(4):
        claim = Walker(ledger).take()
        assert claim.job_id == "a-1"
        ledger.leases.finish_shard(claim)


def test_only_what_is_queued_due_running_and_on_the_queue(ledger: Ledger, create_as: CreateAs) -> None:
    create_as("elsewhere", 1, queue="another")
    create_as("paused", 1)
    ledger.pause_job("paused")
    create_as("job", 2)
    ledger.leases.release(Walker(ledger).take(), "disk full")
    claim = Walker(ledger).take()
    assert (claim.job_id, claim.shard_number, claim.attempt_number) == ("job", 1, 1)
    assert Walker(ledger).claim() is None
    with ledger.database.write() as connection:
        connection.execute(update(shards).where(shards.c.retry_at.is_not(None)).values(retry_at=1.0))
    claim = Walker(ledger).take()
    assert (claim.shard_number, claim.attempt_number) == (0, 2)
    ledger.resume_job("paused")
    assert Walker(ledger).take().job_id == "paused"


def test_one_worker_goes_through_a_job_from_its_beginning(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=8)
    walker = Walker(ledger)
    assert [walker.take().shard_number for _ in range(8)] == list(range(8))


def test_others_start_halfway_between_two_and_walk_on(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=16)
    walkers = [Walker(ledger, str(number)) for number in range(4)]
    assert [walker.take().shard_number for walker in walkers] == [0, 8, 4, 12]
    assert [walker.take().shard_number for walker in walkers] == [1, 9, 5, 13]
    for _ in range(2):
        assert walkers[0].take().shard_number in (2, 3)
    # Its way ends where another's began: on to the longest stretch that is left.
    assert walkers[0].take().shard_number == 7


def test_what_a_dead_worker_left_behind_is_taken_from_its_beginning(ledger: Ledger, create_job: CreateJob) -> None:
    create_job(num_shards=8)
    ledger.leases.release(Walker(ledger, "dead").take())
    assert Walker(ledger).take().shard_number == 0


def test_a_job_is_gone_on_with_after_another_came_between(ledger: Ledger, create_as: CreateAs) -> None:
    create_as("long", 8)
    walker, other = Walker(ledger), Walker(ledger)
    assert [walker.take().shard_number, other.take().shard_number] == [0, 4]
    create_as("urgent", 1, priority=1)
    assert [walker.take().job_id, walker.take().shard_number] == ["urgent", 1]


def test_claims_at_the_same_time_get_different_shards(ledger: Ledger, create_as: CreateAs) -> None:
    for job in range(4):
        create_as(f"job-{job}", 5, tenant=f"tenant-{job % 2}")

    def take_all(number: int) -> list[str]:
        walker = Walker(ledger, str(number))
        return [claim.shard_id for claim in iter(walker.claim, None)]

    with ThreadPoolExecutor(4) as pool:
        taken = [shard_id for shard_ids in pool.map(take_all, range(4)) for shard_id in shard_ids]
    assert len(taken) == len(set(taken)) == 20


@dataclass
class Model:
    """What `claim_next` is to do, over the shards as the ledger lists them."""

    ledger: Ledger
    weights: dict[str, int]

    def choice(self, after: dict[str, int]) -> str | None:
        jobs = [job for job in reversed(self.ledger.jobs()) if job.queue == "bulk" and job.state == "running"]
        of_job = {job.id: self.ledger.shards(job.id) for job in self.ledger.jobs() if job.queue == "bulk"}
        tenant_of = {job.id: job.tenant for job in self.ledger.jobs()}
        leases = Counter(tenant_of[s.job_id] for all in of_job.values() for s in all if s.state == "running")
        free = {job.id: [s.number for s in of_job[job.id] if s.state == "queued" and not s.retry_at] for job in jobs}
        jobs = [job for job in jobs if free[job.id]]
        if not jobs:
            return None
        job = min(
            jobs, key=lambda j: (-j.priority, leases[j.tenant] / self.weights.get(j.tenant, 1), j.created_at, j.id)
        )
        states = [shard.state for shard in of_job[job.id]]
        number = self._number(states, free[job.id], after.get(job.id))
        return f"{job.id}/{number:05d}"

    def _number(self, states: list[ShardState], free: list[int], last: int | None) -> int:
        if last is not None and last + 1 in free:
            return last + 1
        if free[0] == 0 or states[free[0] - 1] != "running":
            return free[0]
        runs = []
        for start in range(1, len(states)):
            if states[start - 1] == "running":
                stop = next((end for end in range(start, len(states)) if states[end] != "queued"), len(states))
                runs.append((start - stop, start, stop))
        _, start, stop = min(runs)
        return next((number for number in free if number >= start + (stop - start) // 2), free[0])


@pytest.mark.parametrize("seed", range(3))
def test_claims_are_what_a_simple_model_says(ledger: Ledger, create_as: CreateAs, seed: int) -> None:
    random = Random(seed)
    weights = {"a": 1, "b": 2}
    weigh(ledger, **weights)
    model = Model(ledger, weights)
    walkers = [Walker(ledger, str(number)) for number in range(3)]
    held: list[Claim] = []
    for number in range(2):
        create_as(f"first-{number}", 12, random.choice("abc"))
    num_jobs = num_claims = 0
    for _ in range(70):
        event = random.random()
        if event < 0.12 and num_jobs < 6:
            num_jobs += 1
            tenant = random.choice("abc")
            create_as(f"job-{num_jobs}", random.randint(1, 12), tenant, random.choice([0, 0, 1]))
        elif event < 0.3 and held:
            ledger.leases.finish_shard(held.pop(random.randrange(len(held))))
        elif event < 0.4 and held:
            ledger.leases.release(held.pop(random.randrange(len(held))), random.choice([None, "disk full"]))
        else:
            walker = random.choice(walkers)
            expected = model.choice(walker.after)
            claim = walker.claim()
            assert (claim.shard_id if claim else None) == expected
            if claim is not None:
                held.append(claim)
                num_claims += 1
    assert num_claims > 15
