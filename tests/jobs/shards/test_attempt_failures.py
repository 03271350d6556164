"""What can go wrong on a shard's way through an attempt, and what is told of it."""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from headrace.engine.config import EngineConfig
from headrace.engine.text.tokenizer import Tokenizer
from headrace.jobs.shards import runner
from headrace.jobs.shards.adapters import AdapterNotHeld, FittingAdapters
from headrace.jobs.shards.faults import is_fault
from headrace.jobs.spec.lora import LoraModule
from headrace.storage.errors import LedgerUnavailable
from headrace.storage.ledger.leases import Leases
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import AttemptOutcome, JobState, NewJob, NewShard, ShardState
from headrace.storage.ledger.tables import jobs
from headrace.storage.output.local_folder import LocalFolder
from headrace.storage.output.manifest import Manifest, write_manifest
from headrace.storage.rows.spool import write_shard

from ...engine.lora.adapters import save_adapter
from ..attempts import ROWS, replace_job, stop_after
from ..conftest import wait_until
from ..running import MODEL
from ..shop import JOB, NO_TYPES, OVER, QUEUE, SHARD


def test_an_engine_failure_hands_the_shard_back_with_the_reason(shop):
    shop.create(ROWS, sampling={"max_tokens": 4})
    shop.runner.fail = RuntimeError("out of\nmemory")
    shop.shard_runner().run(SHARD)
    attempt, shard = shop.ledger.attempts(SHARD)[0], shop.ledger.shards(JOB)[0]
    assert (attempt.outcome, shard.state) == (AttemptOutcome.FAILED, ShardState.QUEUED)
    assert attempt.error == "engine failed: RuntimeError: out of memory"
    assert shop.ledger.job(JOB).error == attempt.error
    shop.runner.fail = None
    shop.shard_runner().run(SHARD)
    shop.assert_complete()
    assert shop.ledger.job(JOB).error is None


def test_after_three_engine_failures_the_open_rows_are_error_rows(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    stop_after(shop, shop.attempt(), start, 0, 1)
    shop.runner.fail = RuntimeError("boom")
    for _ in range(3):
        shop.shard_runner().run(SHARD)
    errors = shop.table()["error"].to_pylist()
    assert errors == [None, None, *["engine failed: RuntimeError: boom"] * 3]
    shop.assert_settled()


def test_an_attempt_that_gets_a_deleted_one_s_number_is_another(shop, start, caplog):
    """As SQLite gives them: a worker may still be at the shard of a job that was deleted."""
    shop.create(ROWS, sampling={"max_tokens": 4})
    worker = shop.shard_runner()
    shop.runner.close()
    first = start(worker.run, SHARD)
    shop.runner.wait_until_reached()
    old, shard = shop.ledger.job(JOB), shop.ledger.shards(JOB)[0]
    shop.ledger.delete_job(JOB)
    job = NewJob("job_2", QUEUE, old.model, old.output_dir, "g", old.num_rows, old.spec)
    shop.ledger.create_job(job, [NewShard(0, shard.num_rows, shard.spool_path)])
    second = start(worker.run, "job_2/00000")
    try:
        wait_until(lambda: len(worker.attempts) == 2, "both are under way")
        worker.renew_leases()
    finally:
        shop.runner.open()
    first.result()
    second.result()
    assert worker.attempts == []
    assert shop.ledger.progress("job_2").state is JobState.COMPLETED
    assert shop.table()["output"].to_pylist() == [shop.text(row.row) for row in ROWS]
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


def test_other_failures_do_not_count_as_the_engines(shop):
    shop.create(ROWS, sampling={"max_tokens": 4})
    away = shop.output.rename(shop.folder / "away")
    for _ in range(3):
        shop.shard_runner().run(SHARD)
    assert "out" in (shop.ledger.job(JOB).error or "")
    away.rename(shop.output)
    shop.runner.fail = RuntimeError("boom")
    shop.shard_runner().run(SHARD)
    shop.runner.fail = None
    shop.shard_runner().run(SHARD)
    shop.assert_complete()


def test_a_worker_that_does_not_find_the_adapter_answers_no_row_for_it(shop):
    """Another may find it, or this one later: it is no row's fault, however often it is tried."""
    folder = shop.folder / "kind"
    shop.create(ROWS, lora={"name": "kind", "path": str(folder)})
    for _ in range(4):
        shop.shard_runner().run(SHARD)
    job, shard = shop.ledger.job(JOB), shop.ledger.shards(JOB)[0]
    assert (job.state, shard.state, shop.ledger.progress(JOB).rows_done) == (JobState.RUNNING, ShardState.QUEUED, 0)
    assert job.error == f"LoRA adapter {folder} does not exist: name the folder that PEFT has saved it in"


def test_a_worker_leaves_an_adapter_that_it_cannot_hold_to_others(shop):
    """They are told by the bells that it got, and the job says meanwhile what it waits for."""
    folder = save_adapter(MODEL, shop.folder / "adapter", rank=17)
    lora = LoraModule(name="large", path=str(folder))
    shop.create(ROWS, lora=lora.model_dump())
    rung: list[str] = []
    small = replace(shop.shard_runner(), adapters=FittingAdapters(EngineConfig(max_lora_rank=16)), ring=rung.extend)
    small.run(SHARD)
    wait_until(lambda: shop.ledger.messages.due_retries(QUEUE) == [SHARD], "it may be taken again")
    small.run(SHARD)
    assert rung == [SHARD]
    assert [attempt.error for attempt in shop.ledger.attempts(SHARD)] == [shop.ledger.progress(JOB).error]
    assert "r=17, above max_lora_rank=16: raise max_lora_rank to 17" in shop.ledger.progress(JOB).error
    large = replace(shop.shard_runner(), adapters=FittingAdapters(EngineConfig(max_lora_rank=17)))
    with pytest.raises(AdapterNotHeld):
        FittingAdapters(EngineConfig(max_lora_rank=16)).expect(lora)
    large.adapters.expect(lora)
    assert large._claim() is not None
    assert shop.ledger.progress(JOB).error is None
    small.run(SHARD)
    assert (rung, small.left_alone) == ([SHARD], set())


def test_jobs_that_a_worker_leaves_alone_are_forgotten_when_others_have_done_them(shop):
    """Each claim asks for something else than all of these: they are not to become more and more."""
    folder = save_adapter(MODEL, shop.folder / "adapter", rank=17)
    shop.create(ROWS, lora={"name": "large", "path": str(folder)})
    # One whose model several processes share holds adapters as any other.
    engine = EngineConfig(max_lora_rank=16, tensor_parallel_size=2)
    small = replace(shop.shard_runner(), adapters=FittingAdapters(engine))
    small.run(SHARD)
    assert (small.left_alone, shop.ledger.progress(JOB).rows_done) == ({JOB}, 0)
    small.left_alone.add("job_that_others_have_done")
    small.left_alone.discard(JOB)
    wait_until(lambda: shop.ledger.messages.due_retries(QUEUE) == [SHARD], "it may be taken again")
    small.run(SHARD)
    assert small.left_alone == {JOB}
    FittingAdapters(replace(engine, max_lora_rank=17)).expect(LoraModule(name="large", path=str(folder)))


@pytest.mark.parametrize("whose", ["job's", "row's"])
def test_a_worker_leaves_jobs_of_a_later_version_to_others(shop, whose):
    """Were it a fault of ours, workers that have been upgraded would take over its rows as errors."""
    shop.create(ROWS, endpoint="/v1/completions")
    if whose == "job's":
        with shop.ledger.database.write() as connection:
            connection.execute(update(jobs).values(spec={**shop.spec.stored(), "beams": 4}))
    else:
        rows = [row._replace(sampling='{"sampling": {}, "beams": 4}') for row in ROWS]
        write_shard(Path(shop.ledger.shards(JOB)[0].spool_path), rows, NO_TYPES)
    old, rung = shop.shard_runner(), list[str]()
    old.ring = rung.extend
    for _ in range(3):
        old.run(SHARD)
    progress = shop.ledger.progress(JOB)
    assert (old.left_alone, rung, progress.rows_done) == ({JOB}, [SHARD, SHARD], 0)
    assert progress.error.endswith("(beams: there is no such option): upgrade this one")
    assert not is_fault(progress.error)


def test_where_a_worker_was_is_forgotten_of_jobs_that_are_long_ago(shop, monkeypatch):
    """Another worker may have ended them, or somebody cancelled them: nobody says so."""
    monkeypatch.setattr(runner, "_MAX_LAST", 2)
    shop.create(ROWS)
    worker, claim = shop.shard_runner(), shop.claim()
    for job_id in ("job_a", "job_b", "job_a", "job_c"):
        worker._note_last(replace(claim, job_id=job_id, shard_number=3))
    assert worker._last == {"job_a": 3, "job_c": 3}


def test_rows_that_cannot_be_written_are_kept_until_there_is_room(shop, start, caplog):
    shop.create(ROWS, sampling={"max_tokens": 4})
    shop.runner.close()
    running = start(shop.attempt(tools=replace(shop.tools, write_seconds=60.0)).run)
    shop.runner.wait_until_reached()
    away = shop.output.rename(shop.folder / "away")
    shop.runner.open()
    wait_until(lambda: "cannot be written" in caplog.text, "it was tried in vain")
    # Whoever follows the job knows before the attempt gives up.
    assert f"{shop.output}" in (shop.ledger.progress(JOB).error or "")
    away.rename(shop.output)
    assert running.result(60) is JobState.COMPLETED
    assert [attempt.error for attempt in shop.ledger.attempts(SHARD)] == [None]
    shop.assert_complete()
    assert shop.runner.num_sequences_started == len(ROWS)


@dataclass
class Faulty:
    """A tokenizer that fails as only a mistake of ours would make it."""

    tokenizer: Tokenizer

    def __getattr__(self, name: str) -> Any:
        if name == "decode":
            raise TypeError("a mistake\nof ours")
        return getattr(self.tokenizer, name)


def test_after_five_faults_of_ours_without_progress_the_open_rows_are_error_rows(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    stop_after(shop, shop.attempt(), start, 0, 1)
    tokenizer: Any = Faulty(shop.tools.tokenizer)
    runner = shop.shard_runner()
    runner.tools = replace(shop.tools, tokenizer=tokenizer)
    for _ in range(5):
        runner.run(SHARD)
    error = "attempt_failed: TypeError: a mistake of ours"
    assert [attempt.error for attempt in shop.ledger.attempts(SHARD)] == [None, *[error] * 5]
    runner.run(SHARD)
    assert shop.table()["error"].to_pylist() == [None, None, *[error] * 3]
    shop.assert_settled()


@dataclass
class WithLeases:
    """A ledger, but for its leases."""

    ledger: Ledger
    leases: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.ledger, name)


@dataclass
class Mistaken:
    """Leases one of whose methods fails as only a mistake of ours would make it."""

    leases: Leases
    method: str

    def __getattr__(self, name: str) -> Any:
        if name == self.method:
            raise TypeError("a mistake of ours")
        return getattr(self.leases, name)


@pytest.mark.parametrize("method", ["commit_part", "finish_shard"])
def test_a_fault_that_error_rows_do_not_help_pauses_the_job_until_it_is_resumed(shop, method):
    shop.create(ROWS, sampling={"max_tokens": 4})
    ledger: Any = WithLeases(shop.ledger, Mistaken(shop.ledger.leases, method))
    runner = shop.shard_runner()
    runner.tools = replace(shop.tools, ledger=ledger)
    for _ in range(20):
        runner.run(SHARD)
    progress = shop.ledger.progress(JOB)
    assert (progress.state, progress.error) == (JobState.PAUSED, "attempt_failed: TypeError: a mistake of ours")
    assert len(shop.ledger.attempts(SHARD)) in (10, 11)
    shop.ledger.resume_job(JOB)
    runner.run(SHARD)
    assert shop.ledger.job(JOB).state is JobState.PAUSED
    runner.tools = shop.tools
    shop.ledger.resume_job(JOB)
    runner.run(SHARD)
    assert shop.ledger.job(JOB).state is JobState.COMPLETED
    assert len(shop.table()) == len(ROWS)


@dataclass
class Unreliable:
    """Leases whose answers to one method get lost a few times, before or after the call has taken effect."""

    leases: Leases
    method: str
    takes_effect: bool
    times: int = 2

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.leases, name)
        if name != self.method:
            return call

        def unreliable(*arguments: Any) -> Any:
            lost, self.times = self.times > 0, self.times - 1
            if self.takes_effect or not lost:
                result = call(*arguments)
            if lost:
                raise LedgerUnavailable("the database is locked")
            return result

        return unreliable


@pytest.mark.parametrize("takes_effect", [False, True], ids=["not done", "done but not answered"])
@pytest.mark.parametrize("method", ["commit_part", "finish_shard"])
def test_finished_rows_are_kept_until_the_ledger_is_back(shop, method, takes_effect):
    shop.create(ROWS, sampling={"max_tokens": 4})
    leases = Unreliable(shop.ledger.leases, method, takes_effect)
    ledger: Any = WithLeases(shop.ledger, leases)
    assert shop.attempt(tools=replace(shop.tools, ledger=ledger)).run() is JobState.COMPLETED
    assert leases.times <= 0
    shop.assert_complete()
    assert shop.runner.num_sequences_started == len(ROWS)


def test_who_is_rung_for_while_the_ledger_is_away_says_so_once_and_waits(shop, start, caplog):
    shop.create(ROWS, sampling={"max_tokens": 4})
    leases = Unreliable(shop.ledger.leases, "claim_next", takes_effect=False, times=2)
    ledger: Any = WithLeases(shop.ledger, leases)
    shard_runner = shop.shard_runner()
    shard_runner.tools = replace(shop.tools, ledger=ledger)
    ringing = [start(partial(shard_runner.run, SHARD)) for _ in range(2)]
    wait_until(lambda: leases.times == 0, "both have asked for a shard")
    shard_runner.drain()
    for each in ringing:
        each.result()
    said = [record.getMessage() for record in caplog.records if "no shard can be taken" in record.getMessage()]
    assert said == ["no shard can be taken: the database is locked"]
    shop.shard_runner().run(SHARD)
    shop.assert_complete()


def test_an_attempt_can_be_stopped_while_the_ledger_is_away(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    leases = Unreliable(shop.ledger.leases, "commit_part", takes_effect=False, times=10**6)
    ledger: Any = WithLeases(shop.ledger, leases)
    claim = shop.claim(lease_seconds=OVER)
    attempt = shop.attempt(claim, replace(shop.tools, ledger=ledger))
    running = start(attempt.run)
    wait_until(lambda: leases.times < 10**6, "a commit was tried")
    attempt.stop()
    with pytest.raises(LedgerUnavailable):
        running.result()
    assert shop.num_committed() == 0
    shop.attempt().run()
    shop.assert_complete()


def test_a_part_whose_file_is_gone_is_generated_again(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    stop_after(shop, shop.attempt(), start, 0, 1)
    write_manifest(LocalFolder(shop.output), Manifest(JOB, "f"))
    gone = shop.ledger.parts(JOB)[0].file_name
    (shop.output / gone).unlink()
    shop.attempt().run()
    shop.assert_complete()
    assert gone not in shop.files()


def test_a_folder_that_is_away_for_a_while_has_each_row_once_when_it_is_back(shop, start, caplog):
    shop.create(ROWS, sampling={"max_tokens": 4})
    stop_after(shop, shop.attempt(), start, 0, 1)
    away = shop.output.rename(shop.folder / "away")
    shop.shard_runner().run(SHARD)
    gone = f"output folder {shop.output} is gone or empty: bring back what was in it"
    assert (shop.ledger.job(JOB).error or "").startswith(gone)
    # As where a disk is mounted no more.
    shop.output.mkdir()
    shop.shard_runner().run(SHARD)
    assert [(attempt.error or "").startswith(gone) for attempt in shop.ledger.attempts(SHARD)] == [False, True, True]
    assert shop.num_committed() == 2
    shop.output.rmdir()
    running = start(shop.attempt(tools=replace(shop.tools, write_seconds=60.0)).run)
    wait_until(lambda: "cannot be written" in caplog.text, "it waits")
    away.rename(shop.output)
    assert running.result(60) is JobState.COMPLETED
    shop.assert_complete()


def test_a_damaged_part_is_told_and_left_for_the_user(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    stop_after(shop, shop.attempt(), start, 0, 1)
    write_manifest(LocalFolder(shop.output), Manifest(JOB, "f"))
    damaged = shop.output / shop.ledger.parts(JOB)[0].file_name
    damaged.write_bytes(b"PAR1 and no more")
    shop.shard_runner().run(SHARD)
    assert f"part {damaged} cannot be read" in (shop.ledger.job(JOB).error or "")
    damaged.unlink()
    shop.shard_runner().run(SHARD)
    shop.assert_complete()


def test_a_spool_that_is_gone_is_told(shop):
    shop.create(ROWS, sampling={"max_tokens": 4})
    Path(shop.ledger.shards(JOB)[0].spool_path).unlink()
    shop.shard_runner().run(SHARD)
    assert "cannot read the spooled shard" in (shop.ledger.job(JOB).error or "")


def test_a_job_that_this_version_cannot_read_is_told(shop):
    shop.create(ROWS, sampling={"max_tokens": 4})
    other = replace_job(shop, "job_2", model=str(shop.model), option_of_tomorrow=1)
    shop.ledger.leases.release(other)
    shop.ledger.set_priority("job_2", 1)
    shop.shard_runner().run("job_2/00000")
    assert "option_of_tomorrow" in (shop.ledger.job("job_2").error or "")
    assert shop.ledger.shards("job_2")[0].state is ShardState.QUEUED


def test_what_the_operator_has_to_mend_is_a_line_of_the_log_and_a_fault_of_ours_more(shop, monkeypatch, caplog):
    shop.create(ROWS, sampling={"max_tokens": 4})
    away = shop.output.rename(shop.folder / "away")
    shop.shard_runner().run(SHARD)
    away.rename(shop.output)
    monkeypatch.setattr(runner, "ShardAttempt", partial(fail_in, ZeroDivisionError("one of ours")))
    shop.shard_runner().run(SHARD)
    outside, ours = [each for each in caplog.records if each.getMessage().startswith("attempt ")]
    assert outside.exc_info is None
    assert outside.getMessage() == f"attempt 1 at shard {SHARD} failed: {shop.ledger.attempts(SHARD)[0].error}"
    assert ours.exc_info is not None
    assert ours.getMessage() == f"attempt 2 at shard {SHARD} failed"


def fail_in(error: Exception, *_: Any) -> None:
    raise error
