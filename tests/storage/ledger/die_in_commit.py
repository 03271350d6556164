"""A worker process of `test_processes.py` that stops at a given step of a commit, to be killed."""

import sys
from pathlib import Path

import pyarrow as pa
from sqlalchemy import Connection

from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import NewPart
from headrace.storage.output import parts
from headrace.storage.output.local_folder import LocalFolder
from headrace.storage.output.sinks import SinkSpec, SqlSink

SCHEMA = parts.output_schema([])


def stop() -> None:
    print("there", flush=True)
    sys.stdin.read()


def main(url: str, folder: Path, last_step: str) -> None:
    ledger = Ledger(url)
    # The lease has run out already: the test need not wait for that.
    claim = ledger.leases.claim_next("bulk", "victim", -1)
    assert claim is not None
    name = parts.part_file_name(claim.job_id, claim.shard_number, claim.attempt_number, 0)
    sink = SqlSink(SinkSpec.parse(url), SCHEMA)
    sink.prepare()
    rows = pa.Table.from_pylist([{"row": 0}, {"row": 1}], schema=SCHEMA)

    def fill(connection: Connection) -> None:
        sink.upsert("job-1", claim.attempt_id, rows, connection)
        if last_step == "fill":
            stop()

    steps = {
        "write": lambda: LocalFolder(folder).write_part(name, pa.table({"row": pa.array([0, 1], pa.int64())})),
        "commit": lambda: ledger.leases.commit_part(claim, NewPart(name, num_rows=2), also=fill),
        "publish": lambda: LocalFolder(folder).publish(name),
    }
    for step, act in steps.items():
        act()
        if step == last_step:
            stop()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
