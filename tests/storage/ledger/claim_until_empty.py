"""A worker process of `test_processes.py`: claims shards until there is none and prints their numbers as JSON."""

import json
import sys
import time

from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import NewPart


def main(url: str, owner: str) -> None:
    ledger = Ledger(url)
    print("ready", flush=True)
    sys.stdin.read()
    claimed: list[int] = []
    after: dict[str, int] = {}
    while (claim := ledger.leases.claim_next("bulk", owner, 60, after)) is not None:
        ledger.leases.commit_part(claim, NewPart(f"part-{claim.shard_number}", num_rows=2))
        ledger.leases.finish_shard(claim)
        claimed.append(claim.shard_number)
        after[claim.job_id] = claim.shard_number
        # As if something was generated: SQLite gives its lock to whoever had it last, rather than to one that waits.
        time.sleep(0.005)
    print(json.dumps(claimed))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
