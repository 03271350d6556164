"""Rows that are committed a few at a time and published together: each there once, whatever ends the attempt."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.jobs.client.verbs import cancel_job, delete_job
from headrace.jobs.errors import Stopped
from headrace.jobs.results.exports import export, json_lines
from headrace.jobs.results.stored_results import read_results
from headrace.jobs.shards import part_writer
from headrace.jobs.shards.attempt import ShardAttempt
from headrace.jobs.shards.part_schema import part_schema
from headrace.storage.errors import LeaseLost, LedgerUnavailable, StorageError
from headrace.storage.ledger.leases import Leases
from headrace.storage.ledger.records import JobState
from headrace.storage.output.local_folder import LocalFolder
from headrace.storage.output.remote_folder import RemoteFolder
from headrace.storage.output.sinks import SinkSpec, SqlSink

from ..attempts import ROWS, ask, in_store
from ..conftest import wait_until
from ..shop import JOB, LONG, OVER, SHARD, Shop

ALL = [row.row for row in ROWS]


class Killed(BaseException):
    """Stands for the death of the process: nothing after it runs."""


@pytest.fixture(params=["disk", "store"])
def shop(shop: Shop, request: pytest.FixtureRequest) -> Shop:
    """Its job writes to a disk or to an object store."""
    return in_store(shop, request) if request.param == "store" else shop


on_disk = pytest.mark.parametrize("shop", ["disk"], indirect=True)


@contextmanager
def with_two_parts(shop: Shop, start: Callable[..., Any], attempt: ShardAttempt) -> Iterator["Future[JobState]"]:
    """An attempt that has committed two parts of a row each and waits for the engine, which is open after that."""
    shop.runner.close()
    try:
        running: Future[JobState] = start(attempt.run)
        shop.permit_rows(0)
        wait_until(lambda: shop.num_committed() == 1, "the first row is committed")
        shop.permit_rows(1)
        wait_until(lambda: shop.num_committed() == 2, "the second row is committed")
        assert len(shop.ledger.parts(JOB)) == 2
        yield running
    finally:
        shop.runner.open()


def rows_by_the_ledger(shop: Shop) -> list[int]:
    table = read_results(shop.ledger, shop.ledger.job(JOB))
    return table["row"].to_pylist() if len(table) else []


def rows_in_the_folder(shop: Shop) -> list[int]:
    return [row for path in shop.output.glob("*.parquet") for row in pq.read_table(path)["row"].to_pylist()]


def test_a_shard_of_many_flushes_has_one_part(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    with with_two_parts(shop, start, shop.attempt()):
        assert rows_by_the_ledger(shop) == [0, 1]
        assert shop.in_store or rows_in_the_folder(shop) == []
    wait_until(lambda: shop.ledger.job(JOB).state is JobState.COMPLETED, "the job is done")
    assert len(shop.ledger.parts(JOB)) == 1
    shop.assert_complete()


def test_a_shard_of_one_flush_is_written_once(shop, monkeypatch):
    written: list[str] = []
    for kind in (LocalFolder, RemoteFolder):

        def note(folder: Any, name: str, table: pa.Table, write: Callable[..., None] = kind.write_part) -> None:
            written.append(name)
            write(folder, name, table)

        monkeypatch.setattr(kind, "write_part", note)
    shop.create(ROWS, sampling={"max_tokens": 4})
    shop.attempt(tools=replace(shop.tools, flush_seconds=LONG)).run()
    assert len(written) == 1
    shop.assert_complete()


@pytest.mark.parametrize("limit", ["seconds", "bytes"])
@on_disk
def test_in_a_long_shard_rows_do_not_wait_for_its_end(shop, start, monkeypatch, limit):
    shop.create(ROWS, sampling={"max_tokens": 4})
    attempt = shop.attempt()
    if limit == "bytes":
        monkeypatch.setattr(part_writer, "_MAX_UNPUBLISHED_BYTES", 1)
    else:
        attempt.tools = replace(shop.tools, publish_seconds=0.02)
    shop.runner.close()
    running = start(attempt.run)
    shop.permit_rows(0, 1)
    # Without another row that is finished.
    wait_until(lambda: sorted(rows_in_the_folder(shop)) == [0, 1], "two rows are published")
    before = shop.files()
    shop.runner.open()
    running.result(60)
    shop.assert_complete()
    assert shop.files().items() >= {name: at for name, at in before.items() if not name.startswith(".")}.items()


@on_disk
def test_who_reads_the_folder_or_the_ledger_meanwhile_loses_no_row_and_sees_none_twice(shop, start):
    rows = ask(*((1 + number % 7, 2) for number in range(150)))
    shop.create(rows, sampling={"max_tokens": 4})
    attempt = shop.attempt(tools=replace(shop.tools, flush_seconds=0.001, publish_seconds=0.05))
    is_over = threading.Event()

    def watch(read: Callable[[], list[int]]) -> None:
        before: set[int] = set()
        while True:
            was_over = is_over.is_set()
            found = read()
            assert len(found) == len(set(found))
            assert before <= set(found)
            if was_over:
                return
            before = set(found)

    def exported() -> list[int]:
        lines = b"".join(export(shop.ledger, shop.ledger.job(JOB), json_lines)).splitlines()
        return [int(line.split(b",")[0].split(b":")[1]) for line in lines]

    readers = [
        start(watch, read) for read in (lambda: rows_in_the_folder(shop), lambda: rows_by_the_ledger(shop), exported)
    ]
    try:
        assert attempt.run() is JobState.COMPLETED
    finally:
        is_over.set()
    for reader in readers:
        reader.result(60)
    shop.assert_complete()


def kill_at(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Die before one of the steps in which parts of five rows in all become one."""

    def dying(original: Callable[..., None]) -> Callable[..., None]:
        def call(*given: Any) -> None:
            if is_it(*given):
                raise Killed
            original(*given)

        return call

    steps: dict[str, tuple[str, Callable[..., bool]]] = {
        "write": ("write_part", lambda folder, name, table: len(table) == len(ROWS)),
        "commit": ("commit_part", lambda leases, claim, part, *others: part.num_rows == len(ROWS)),
        "remove": ("remove_merged", lambda folder, names: True),
        "publish": ("publish", lambda folder, name: True),
        "finish": ("finish_shard", lambda leases, claim: True),
    }
    method, is_it = steps[step]
    for kind in (LocalFolder, RemoteFolder) if hasattr(LocalFolder, method) else (Leases,):
        monkeypatch.setattr(kind, method, dying(getattr(kind, method)))


@pytest.mark.parametrize("step", ["write", "commit", "remove", "publish", "finish"])
def test_wherever_it_is_killed_each_row_is_there_once(shop, start, monkeypatch, step):
    shop.create(ROWS, sampling={"max_tokens": 4})
    started = shop.runner.num_sequences_started
    with monkeypatch.context() as patch:
        with with_two_parts(shop, start, shop.attempt(shop.claim(lease_seconds=OVER))) as running:
            kill_at(patch, step)
        with pytest.raises(Killed):
            running.result(60)
    committed = rows_by_the_ledger(shop)
    assert set(committed) >= {0, 1}
    assert (committed == ALL) >= (step in ("remove", "publish", "finish"))
    seen = rows_in_the_folder(shop)
    assert shop.in_store or (len(seen) == len(set(seen)) and set(seen) <= set(committed))
    shop.attempt().run()
    shop.assert_complete()
    assert shop.runner.num_sequences_started - started <= 2 * len(ROWS) - len(committed)


@on_disk
def test_what_a_killed_attempt_has_left_becomes_one_part(shop, start, monkeypatch):
    shop.create(ROWS, sampling={"max_tokens": 4})
    with monkeypatch.context() as patch:
        with with_two_parts(shop, start, shop.attempt(shop.claim(lease_seconds=OVER))) as running:
            kill_at(patch, "write")
        with pytest.raises(Killed):
            running.result(60)
    left = rows_by_the_ledger(shop)
    attempt = shop.attempt(tools=replace(shop.tools, flush_seconds=LONG))
    attempt.run()
    shop.assert_complete()
    by_part = [pq.read_table(path)["row"].to_pylist() for path in shop.output.glob("*.parquet")]
    assert sorted(map(sorted, by_part)) == sorted([left, [row for row in ALL if row not in left]])
    assert {part.attempt_id for part in shop.ledger.parts(JOB)} == {attempt.claim.attempt_id}


@on_disk
def test_what_workers_of_other_versions_have_left_stays_as_it_is(shop, start, monkeypatch):
    shop.create(ROWS, sampling={"max_tokens": 4})
    with monkeypatch.context() as patch:
        with with_two_parts(shop, start, shop.attempt(shop.claim(lease_seconds=OVER))) as running:
            kill_at(patch, "write")
        with pytest.raises(Killed):
            running.result(60)
    older, *others = list(shop.output.glob(".part-*.tmp"))
    pq.write_table(pq.read_table(older).drop_columns(["receipt"]), older)
    shop.attempt(tools=replace(shop.tools, flush_seconds=LONG)).run()
    assert sorted(rows_in_the_folder(shop)) == ALL
    assert len(list(shop.output.glob("*.parquet"))) == len(others) + 2


@on_disk
def test_a_merge_whose_answer_is_lost_with_the_lease_leaves_nothing_else(shop, start, monkeypatch):
    shop.create(ROWS, sampling={"max_tokens": 4})
    commit = Leases.commit_part

    def cancelled(leases: Leases, claim: Any, part: Any, *others: Any) -> None:
        commit(leases, claim, part, *others)
        if part.num_rows == len(ROWS):
            monkeypatch.setattr(Leases, "commit_part", commit)
            # The worker asks again, as it would have to after a connection that was reset.
            shop.ledger.cancel_job(JOB)
            raise LedgerUnavailable("the connection was reset")

    monkeypatch.setattr(Leases, "commit_part", cancelled)
    with with_two_parts(shop, start, shop.attempt()) as running:
        pass
    with pytest.raises(LeaseLost):
        running.result(60)
    assert rows_by_the_ledger(shop) == ALL == sorted(rows_in_the_folder(shop))
    assert not list(shop.output.glob(".part*"))


@pytest.mark.parametrize("takes_effect", [False, True], ids=["not done", "done but not answered"])
def test_a_merge_whose_answer_is_lost_is_made_once(shop, start, monkeypatch, takes_effect):
    shop.create(ROWS, sampling={"max_tokens": 4})
    commit = Leases.commit_part

    def unreliable(leases: Leases, claim: Any, part: Any, *others: Any) -> None:
        if part.num_rows < len(ROWS):
            return commit(leases, claim, part, *others)
        monkeypatch.setattr(Leases, "commit_part", commit)
        if takes_effect:
            commit(leases, claim, part, *others)
        raise LedgerUnavailable("the connection was reset")

    monkeypatch.setattr(Leases, "commit_part", unreliable)
    with with_two_parts(shop, start, shop.attempt()) as running:
        pass
    running.result(60)
    assert len(shop.ledger.parts(JOB)) == 1
    shop.assert_complete()


def test_without_room_to_merge_the_parts_stay_as_they_are(shop, start, monkeypatch, caplog):
    shop.create(ROWS, sampling={"max_tokens": 4})
    for kind in (LocalFolder, RemoteFolder):
        write = kind.write_part

        def refuse(folder: Any, name: str, table: pa.Table, write: Callable[..., None] = write) -> None:
            if len(table) == len(ROWS):
                raise StorageError("no space left")
            write(folder, name, table)

        monkeypatch.setattr(kind, "write_part", refuse)
    with with_two_parts(shop, start, shop.attempt()) as running:
        pass
    running.result(60)
    assert f"the parts of shard {SHARD} are left as they are: no space left" in caplog.text
    assert len(shop.ledger.parts(JOB)) >= 3
    shop.assert_complete()


@pytest.mark.parametrize("how", ["stop", "pause", "cancel", "lease lost", "failure"])
def test_what_is_committed_is_published_however_the_attempt_ends(shop, start, how):
    shop.create(ROWS, sampling={"max_tokens": 4})
    attempt = shop.attempt(shop.claim(lease_seconds=OVER))
    with with_two_parts(shop, start, attempt) as running:
        if how == "pause":
            shop.ledger.pause_job(JOB)
        elif how == "cancel":
            shop.ledger.cancel_job(JOB)
        elif how == "lease lost":
            shop.claim()
        elif how == "failure":
            shop.runner.fail = RuntimeError("boom")
        if how in ("stop", "pause"):
            attempt.stop()
            with pytest.raises(Stopped):
                running.result(60)
    if how not in ("stop", "pause"):
        with pytest.raises((LeaseLost, StorageError)):
            running.result(60)
    assert sorted(rows_in_the_folder(shop)) == rows_by_the_ledger(shop)
    assert rows_by_the_ledger(shop)[:2] == [0, 1]
    assert not list(shop.output.glob(".part*"))


@pytest.mark.parametrize("is_deleted", [False, True], ids=["cancelled", "deleted"])
@on_disk
def test_what_a_killed_attempt_has_committed_is_published_as_the_job_ends(shop, start, monkeypatch, is_deleted):
    shop.create(ROWS, sampling={"max_tokens": 4})
    with monkeypatch.context() as patch:
        with with_two_parts(shop, start, shop.attempt()) as running:
            kill_at(patch, "write")
        with pytest.raises(Killed):
            running.result(60)
    committed = rows_by_the_ledger(shop)
    assert rows_in_the_folder(shop) == []
    if is_deleted:
        delete_job(shop.ledger, shop.folder / "jobs", JOB, with_output=False)
    else:
        cancel_job(shop.ledger, JOB)
    assert sorted(rows_in_the_folder(shop)) == committed


@on_disk
def test_a_sink_gets_each_row_once(shop, start, monkeypatch, tmp_path):
    written: list[int] = []
    upsert = SqlSink.upsert

    def noted(sink: SqlSink, job_id: str, attempt_id: int, part: pa.Table, *others: Any) -> None:
        written.extend(part["row"].to_pylist())
        upsert(sink, job_id, attempt_id, part, *others)

    monkeypatch.setattr(SqlSink, "upsert", noted)
    shop.create(ROWS, sampling={"max_tokens": 4})
    sink = SinkSpec.parse(f"sqlite:///{tmp_path / 'ledger.db'}", "answers")
    SqlSink(sink, part_schema(shop.spec, ())).prepare()
    attempt = ShardAttempt(shop.tools, shop.claim(), replace(shop.ledger.job(JOB), sink=sink.as_dict()))
    with with_two_parts(shop, start, attempt) as running:
        pass
    running.result(60)
    assert sorted(written) == ALL
