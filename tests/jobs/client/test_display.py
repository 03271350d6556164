"""What is shown of a job on its way, by what it is written to."""

import time
from dataclasses import replace

import pytest

from headrace.jobs.cli.summary import summary
from headrace.jobs.client import display
from headrace.jobs.client.display import JobDisplay, Pace, RunDisplay, is_looked_at
from headrace.storage.ledger.records import JobState, Progress

from ..running import MODEL


def progress(done: int, failed: int = 0, from_cache: int = 0, total: int = 10, truncated: int = 0) -> Progress:
    return Progress(
        job_id="job_a",
        state=JobState.RUNNING,
        rows_total=total,
        rows_done=done,
        rows_failed=failed,
        rows_from_cache=from_cache,
        rows_truncated=truncated,
        prompt_tokens=0,
        cached_tokens=0,
        completion_tokens=0,
        shards_total=1,
        shards_done=0,
        error=None,
    )


@pytest.mark.parametrize(("term", "has_lines"), [("dumb", True), ("xterm", False)])
def test_a_terminal_that_cannot_redraw_gets_lines(monkeypatch, capsys, term, has_lines):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(display, "_PLAIN_LINE_SECONDS", -1.0)
    with RunDisplay(Pace(progress(0))) as shown:
        shown.show(progress(5))
    assert ("5/10 rows  waiting for a worker\n" in capsys.readouterr().err) == has_lines


def test_a_notebook_gets_one_line(monkeypatch, capsys):
    notebook = type("ZMQInteractiveShell", (), {"__module__": "ipykernel.zmqshell"})()
    monkeypatch.setattr("builtins.get_ipython", lambda: notebook, raising=False)
    assert is_looked_at()
    with RunDisplay(Pace(progress(0))) as shown:
        shown.show(progress(5))
        shown.show(replace(progress(10), state=JobState.COMPLETED))
    longer, shorter = "5/10 rows  waiting for a worker", "10/10 rows  completed"
    assert capsys.readouterr().err == f"\r{longer}\r{shorter.ljust(len(longer))}\n"


def test_a_run_goes_on_though_its_log_takes_nothing(monkeypatch):
    monkeypatch.setattr(display, "_PLAIN_LINE_SECONDS", -1.0)
    full = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr("sys.stderr", full)
    with RunDisplay(Pace(progress(0))) as shown:
        shown.show(progress(5))
    # What it holds back cannot be written either.
    with pytest.raises(OSError, match="No space left"):
        full.close()


def test_a_worker_that_is_long_in_coming_has_a_log(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(display, "_PLAIN_LINE_SECONDS", -1.0)
    log = tmp_path / "worker.log"
    pace = Pace(progress(0), log, started_at=time.monotonic() - 600)
    with RunDisplay(pace) as shown:
        shown.show(progress(0))
        log.touch()
        shown.show(progress(0))
    without, with_log = capsys.readouterr().err.splitlines()
    assert without == "0/10 rows  waiting for a worker"
    assert with_log.startswith("0/10 rows  waiting for a worker, for 10:")
    assert with_log.endswith(f": what it is at is in {log}")


def test_each_row_is_counted_once():
    pace = Pace(progress(4, failed=1))
    said = summary(pace, progress(10, failed=3, from_cache=2), "out")
    assert "10 of 10: 2 generated, 2 from the result cache, 3 kept from before, 3 failed" in said
    assert "truncated" not in said


def test_a_retry_goes_as_fast_as_rows_fail_no_more():
    """They were done before, as failed ones."""
    pace = Pace(progress(10, failed=6))
    pace.started_at = pace.ready_at = time.monotonic() - 2
    pace.end()
    assert pace.rows_per_second(progress(10, failed=2)) == pytest.approx(2, rel=0.1)
    assert pace.eta_seconds(progress(10, failed=2)) == pytest.approx(1, rel=0.1)
    assert pace.rows_ended(progress(10, failed=6)) == 0
    assert "10 of 10: 4 generated, 4 kept from before, 2 failed" in summary(pace, progress(10, failed=2), "out")


def test_answers_that_were_cut_off_are_told_of():
    pace = Pace(progress(0))
    for number, answers in ((1, "1 answer"), (1200, "1,200 answers")):
        lines = summary(pace, progress(2000, truncated=number, total=2000), "out").splitlines()
        assert lines[2] == f"truncated   {answers} ended at max_tokens, or with the context (finish_reason 'length')"


@pytest.mark.parametrize("term", ["dumb", "xterm"])
def test_large_numbers_are_in_groups_of_three(monkeypatch, capsys, term):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(display, "_PLAIN_LINE_SECONDS", -1.0)
    pace = Pace(progress(1000, total=20_000))
    done = progress(15_000, failed=2000, from_cache=4000, total=20_000)
    with RunDisplay(pace) as shown:
        shown.show(done)
    assert "15,000/20,000" in capsys.readouterr().err
    said = summary(pace, done, "out")
    assert (
        "15,000 of 20,000: 8,000 generated, 4,000 from the result cache, 1,000 kept from before, 2,000 failed" in said
    )


def test_a_job_that_was_done_between_two_looks_has_taken_its_time():
    pace = Pace(progress(0), started_at=100.0)
    pace.waits()
    pace.end()
    assert 0 < pace.working_seconds < pace.seconds
    assert pace.rows_per_second(progress(10)) > 0


def test_nothing_was_timed_of_a_job_that_had_ended_before():
    done = replace(progress(20), state=JobState.COMPLETED)
    pace = Pace(done)
    pace.end()
    assert [line.split()[0] for line in summary(pace, done, "out").splitlines()] == ["job", "rows", "output"]


def test_a_slow_models_rate_is_not_called_zero(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(display, "_PLAIN_LINE_SECONDS", -1.0)
    pace = Pace(progress(0))
    pace.ready_at = time.monotonic() - 100
    with RunDisplay(pace) as shown:
        shown.show(progress(3))
    pace.end()
    assert "rows  0.03 rows/s  " in capsys.readouterr().err
    assert "rate        0.03 rows/s" in summary(pace, progress(3), "out")


def test_work_without_a_finished_row_is_not_called_a_rate_of_zero(monkeypatch, capsys):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(display, "_PLAIN_LINE_SECONDS", -1.0)
    # As a job that goes on, with rows of before.
    pace = Pace(progress(3))
    pace.ready_at = time.monotonic() - 125
    with RunDisplay(pace) as shown:
        shown.show(progress(3))
        shown.show(progress(4))
    waiting, going = capsys.readouterr().err.splitlines()
    assert waiting.endswith("no row has ended yet, after 2:05 with the model loaded")
    assert "rows/s" in going


def test_only_a_job_that_was_over_before_anybody_looked_is_timed_by_the_ledger(unserved, tmp_path):
    job = unserved.submit([{"text": "x"}], MODEL, tmp_path / "out", prompt="{text}")
    running = job.progress()
    ended = replace(running, state=JobState.CANCELLED)
    job.cancel()
    record = unserved.ledger.job(job.id)
    took = record.finished_at - record.created_at
    looked_at, unseen, known = JobDisplay(job, running), JobDisplay(job, running), JobDisplay(job, ended)
    looked_at.show(running)
    for shown in (looked_at, unseen, known):
        shown.show(ended)
    assert unseen.pace.seconds == unseen.pace.working_seconds == pytest.approx(took)
    assert looked_at.pace.working_seconds < looked_at.pace.seconds != pytest.approx(took)
    assert known.pace.working_seconds == 0
