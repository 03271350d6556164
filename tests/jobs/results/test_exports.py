"""A job's results as one file, of what was committed when it began."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from headrace.jobs.results import exports
from headrace.jobs.results.exports import arrow, export, json_lines, parquet
from headrace.storage.errors import PartDamaged
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import Claim, NewJob, NewPart, NewShard
from headrace.storage.output.local_folder import LocalFolder

from ...storage.ledger.claiming import take_shard


@pytest.fixture
def running(tmp_path: Path) -> Iterator[tuple[Ledger, Claim]]:
    """A job that runs, nothing of which is committed."""
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    ledger.migrate()
    folder = tmp_path / "out"
    folder.mkdir()
    job = NewJob("job_1", "queue", "/m", str(folder), "print", 10, {"model": "/m"})
    ledger.create_job(job, [NewShard(0, 10, "/spool")])
    claim = take_shard(ledger, "job_1/00000", "owner", 60)
    assert claim is not None
    yield ledger, claim
    ledger.close()


def commit(running: tuple[Ledger, Claim], number: int, rows: list[int]) -> None:
    ledger, claim = running
    folder = Path(ledger.job("job_1").output_dir)
    name = f"part-00000-01-{number:03d}.parquet"
    LocalFolder(folder).write_part(name, pa.table({"row": rows, "output": [f"answer {row}" for row in rows]}))
    ledger.leases.commit_part(claim, NewPart(name, len(rows)))
    LocalFolder(folder).publish(name)


def test_an_export_has_what_was_committed_when_it_began(
    running: tuple[Ledger, Claim], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "_GROUP_ROWS", 2)
    commit(running, 0, [3, 1])
    commit(running, 1, [0, 2])
    ledger = running[0]
    pieces = export(ledger, ledger.job("job_1"), arrow)
    first = next(pieces)
    commit(running, 2, [4, 5])
    assert pa.ipc.open_stream(first + b"".join(pieces)).read_all()["row"].to_pylist() == [3, 1, 0, 2]
    whole = pq.read_table(io.BytesIO(b"".join(export(ledger, ledger.job("job_1"), parquet))))
    assert whole["row"].to_pylist() == [3, 1, 0, 2, 4, 5]
    lines = b"".join(export(ledger, ledger.job("job_1"), json_lines)).splitlines()
    assert [json.loads(line)["output"] for line in lines] == [f"answer {row}" for row in (3, 1, 0, 2, 4, 5)]


@pytest.mark.parametrize("place", ["begin", "end"])
def test_an_export_says_which_part_is_damaged(running: tuple[Ledger, Claim], place: str) -> None:
    commit(running, 0, [3, 1])
    ledger = running[0]
    part = Path(ledger.job("job_1").output_dir) / "part-00000-01-000.parquet"
    content = bytearray(part.read_bytes())
    end = int.from_bytes(content[-8:-4], "little")
    damaged = slice(4, 40) if place == "begin" else slice(-8 - end, -8)
    content[damaged] = b"\xff" * len(content[damaged])
    part.write_bytes(content)
    with pytest.raises(PartDamaged, match=f"part {part} cannot be read"):
        list(export(ledger, ledger.job("job_1"), parquet))


def test_an_export_of_nothing_yet(running: tuple[Ledger, Claim]) -> None:
    ledger = running[0]
    for write in (parquet, arrow, json_lines):
        content = b"".join(export(ledger, ledger.job("job_1"), write))
        if write is parquet:
            assert pq.read_table(io.BytesIO(content)).num_rows == 0
        elif write is arrow:
            assert "output" in pa.ipc.open_stream(content).schema.names
        else:
            assert content == b""
