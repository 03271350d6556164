"""A worker process of `test_processes.py` that stops at a given step of a commit, to be killed."""

import sys
from pathlib import Path

import pyarrow as pa

from headrace.storage import parts
from headrace.storage.ledger import Ledger
from headrace.storage.records import NewPart


def main(url: str, folder: Path, last_step: str) -> None:
    ledger = Ledger(url)
    # The lease has run out already: the test need not wait for that.
    claim = ledger.claim_next("bulk", "victim", -1)
    assert claim is not None
    name = parts.part_file_name(claim.shard_number, claim.attempt_number, 0)
    steps = {
        "write": lambda: parts.write_part(folder, name, pa.table({"row": pa.array([0, 1], pa.int64())})),
        "commit": lambda: ledger.commit_part(claim, NewPart(name, num_rows=2)),
        "publish": lambda: parts.publish(folder, name),
    }
    for step, act in steps.items():
        act()
        if step == last_step:
            print("there", flush=True)
            sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
