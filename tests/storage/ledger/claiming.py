"""What the ledger's tests claim with. A lease of -1 seconds has run out when it is given."""

from collections.abc import Callable

from headrace.storage.ledger.leases import take
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import (
    AttemptOutcome,
    Claim,
    NewPart,
    ShardState,
)

CreateJob = Callable[..., str]
PART = NewPart("part-00000-01-000.parquet", num_rows=2, num_failed=1, prompt_tokens=20, completion_tokens=4)


def take_shard(ledger: Ledger, shard_id: str, owner: str, lease_seconds: float) -> Claim | None:
    """What a worker gets whose turn comes to this very shard; one whose lease ran out is put back before."""
    job_id = shard_id.rpartition("/")[0]
    if any(shard.id == shard_id and shard.state is ShardState.RUNNING for shard in ledger.shards(job_id)):
        ledger.messages.requeue_expired(ledger.job(job_id).queue)
    with ledger.database.write() as connection:
        return take(connection, shard_id, owner, lease_seconds)


def claimed(ledger: Ledger, shard_id: str, owner: str = "worker-a", lease_seconds: float = 60) -> Claim:
    claim = take_shard(ledger, shard_id, owner, lease_seconds)
    assert claim is not None
    return claim


def outcomes(ledger: Ledger, shard_id: str) -> list[AttemptOutcome | None]:
    return [attempt.outcome for attempt in ledger.attempts(shard_id)]
