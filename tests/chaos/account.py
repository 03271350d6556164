"""What a disturbed run's attempts came to."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import AttemptOutcome, AttemptRecord, ShardRecord


@dataclass(frozen=True)
class Account:
    """How a run's attempts ended. `num_open_rows`: of those that were interrupted, rows they had not committed."""

    outcomes: Counter[str]
    num_open_rows: int

    @classmethod
    def of(cls, ledger: Ledger, job_ids: Iterable[str]) -> Self:
        outcomes: Counter[str] = Counter()
        num_open_rows = 0
        for shard in (shard for job_id in job_ids for shard in ledger.shards(job_id)):
            attempts = ledger.attempts(shard.id)
            outcomes.update(str(attempt.outcome) for attempt in attempts)
            num_open_rows += _num_open_rows(ledger, shard, attempts)
        return cls(outcomes, num_open_rows)

    def __str__(self) -> str:
        return "attempts " + ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))


def _num_open_rows(ledger: Ledger, shard: ShardRecord, attempts: list[AttemptRecord]) -> int:
    """What is generated again was in flight when an attempt ended without having done its shard."""
    num_rows_of = Counter[int]()
    for part in ledger.parts(shard.job_id, shard.number):
        num_rows_of[part.attempt_id] += part.num_rows
    num_open, num_open_rows = shard.num_rows, 0
    for attempt in attempts:
        num_open -= num_rows_of[attempt.id]
        if attempt.outcome is not AttemptOutcome.DONE:
            num_open_rows += num_open
    return num_open_rows
