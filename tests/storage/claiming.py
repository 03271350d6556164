"""What the ledger's tests claim with. A lease of -1 seconds has run out when it is given."""

from collections.abc import Callable

from headrace.storage.ledger import Ledger
from headrace.storage.records import (
    AttemptOutcome,
    Claim,
    NewPart,
)

CreateJob = Callable[..., str]
PART = NewPart("part-00000-01-000.parquet", num_rows=2, num_failed=1, prompt_tokens=20, completion_tokens=4)


def claimed(ledger: Ledger, shard_id: str, owner: str = "worker-a", lease_seconds: float = 60) -> Claim:
    claim = ledger.claim(shard_id, owner, lease_seconds)
    assert claim is not None
    return claim


def outcomes(ledger: Ledger, shard_id: str) -> list[AttemptOutcome | None]:
    return [attempt.outcome for attempt in ledger.attempts(shard_id)]
