"""A worker process of `test_processes.py`: claims every shard it can get and prints their numbers as JSON."""

import json
import sys

from headrace.storage.ledger import Ledger
from headrace.storage.records import NewPart


def main(url: str, owner: str, num_shards: int) -> None:
    ledger = Ledger(url)
    print("ready", flush=True)
    sys.stdin.readline()
    claimed = []
    for number in range(num_shards):
        claim = ledger.claim(f"job-1/{number:05d}", owner, 60)
        if claim is not None:
            ledger.commit_part(claim, NewPart(f"part-{number}", num_rows=2))
            ledger.finish_shard(claim)
            claimed.append(number)
    print(json.dumps(claimed))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
