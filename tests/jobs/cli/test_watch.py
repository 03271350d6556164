"""`headrace watch` over several jobs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.jobs.cli.follow import follow
from headrace.jobs.client import display
from headrace.jobs.client.client import Client

from ..running import LABELS, MODEL, Result, environment, started

Headrace = Callable[..., Result]


def submitted(headrace: Headrace, data_dir: Path, folder: Path, *names: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    rows = folder / "rows.jsonl"
    rows.write_text('{"text": "It is late."}\n' * 3)
    options = ("--model", MODEL, "--prompt", "{text}", "--choices", ",".join(LABELS))
    return [
        headrace(data_dir, "submit", rows, *options, "--output", folder / name).out.splitlines()[-1] for name in names
    ]


def test_those_that_are_named(served: Path, headrace: Headrace, tmp_path: Path) -> None:
    job_ids = submitted(headrace, served, tmp_path, "a", "b")
    watched = headrace(served, "watch", *job_ids)
    assert watched.status == 0
    heading, *lines = watched.out.splitlines()
    assert heading.split() == ["JOB", "STATE", "ROWS", "FAILED"]
    assert [line.split() for line in lines] == [[job_id, "completed", "3/3", "0"] for job_id in job_ids]
    assert headrace(served, "watch", job_ids[0], "job_none").status == 2


def test_a_job_shows_the_one_it_waits_for(
    unserved: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display, "_PLAIN_LINE_SECONDS", -1.0)
    rows = [{"text": "It is late."}] * 3
    stale, job = (unserved.submit(rows, MODEL, tmp_path / name, prompt="{text}") for name in "ab")
    # Once it has been shown.
    follow(unserved, job, job.progress(), lambda progress: job.cancel())
    ahead = f"waiting behind {stale.id} (3 rows left; `headrace cancel {stale.id}` drops it)"
    assert f"0/3 rows  {ahead}\n" in capsys.readouterr().err


def test_one_whose_data_set_was_overwritten_says_by_whom(
    unserved: Client, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"text": "It is late."}] * 3
    old = unserved.submit(rows, MODEL, tmp_path / "out", prompt="{text}")
    new = unserved.submit(rows[:2], MODEL, tmp_path / "out", prompt="{text}", mode="overwrite")
    assert follow(unserved, old, old.progress(), lambda progress: None) == 1
    shown = capsys.readouterr().out
    assert f"{old.id} cancelled\n" in shown
    assert f"\nreplaced    by {new.id}, whose data set the output is now (--overwrite)\n" in shown
    new.delete(with_output=True)
    assert follow(unserved, old, old.progress(), lambda progress: None) == 1
    assert "replaced" not in capsys.readouterr().out


def test_all_that_run(headrace: Headrace, tmp_path: Path, wait_until: Callable[..., None]) -> None:
    data_dir = tmp_path / "data"
    none = headrace(data_dir, "watch")
    assert (none.status, none.out) == (0, "no job is running\n")
    first, second, ended = submitted(headrace, data_dir, tmp_path / "rows", "a", "b", "c")
    headrace(data_dir, "cancel", ended)
    with started(["watch"], environment(data_dir), tmp_path) as watch:
        ahead = f"behind {first} (3 rows left; `headrace cancel {first}` drops it)\n"
        wait_until(lambda: ahead in (tmp_path / "err").read_text(), "it shows the jobs, and which one goes first")
        shown = (tmp_path / "err").read_text().splitlines()
        assert {line.split()[0] for line in shown if "behind" in line} == {second}
        unserved = f"  a worker: headrace worker --model {MODEL}"
        assert {line.split()[0] for line in shown if line.endswith(unserved)} == {first}
        for job_id in (first, second):
            assert headrace(data_dir, "cancel", job_id).status == 0
        assert watch.wait(60) == 1
    assert ended not in (tmp_path / "err").read_text()
    lines = (tmp_path / "out").read_text().splitlines()[1:]
    assert [line.split() for line in lines] == [[job_id, "cancelled", "0/3", "0"] for job_id in (first, second)]
