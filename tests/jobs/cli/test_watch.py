"""`headrace watch` over several jobs."""

from collections.abc import Callable
from pathlib import Path

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


def test_all_that_run(headrace: Headrace, tmp_path: Path, wait_until: Callable[..., None]) -> None:
    data_dir = tmp_path / "data"
    none = headrace(data_dir, "watch")
    assert (none.status, none.out) == (0, "no job is running\n")
    first, second, ended = submitted(headrace, data_dir, tmp_path / "rows", "a", "b", "c")
    headrace(data_dir, "cancel", ended)
    with started(["watch"], environment(data_dir), tmp_path) as watch:
        wait_until(lambda: second in (tmp_path / "err").read_text(), "it shows the jobs")
        for job_id in (first, second):
            assert headrace(data_dir, "cancel", job_id).status == 0
        assert watch.wait(60) == 1
    assert ended not in (tmp_path / "err").read_text()
    lines = (tmp_path / "out").read_text().splitlines()[1:]
    assert [line.split() for line in lines] == [[job_id, "cancelled", "0/3", "0"] for job_id in (first, second)]
