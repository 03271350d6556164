"""`headrace results`: JSON that every reader takes, and no silence about rows that are gone."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.storage.ledger.records import NewJob, NewShard
from headrace.storage.output.local_folder import LocalFolder
from headrace.storage.output.parts import part_summary

from ...ledgers import new_ledger
from ..models import write_model_folder
from ..running import MODEL, assert_refused, label_arguments, write_lines


def strict(line: str) -> dict[str, Any]:
    """A row; NaN and Infinity are no JSON."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} in {line}")

    row: dict[str, Any] = json.loads(line, parse_constant=refuse)
    return row


def test_what_json_cannot_say_is_null(served, headrace, tmp_path):
    scores = [1.5, math.nan, math.inf]
    pq.write_table(pa.table({"text": ["It is late."] * 3, "score": scores}), tmp_path / "rows.parquet")
    job = headrace(served, *label_arguments(tmp_path / "rows.parquet", tmp_path / "out")).out.split()[1]
    rows = [strict(line) for line in headrace(served, "results", job).out.splitlines()]
    assert [row["score"] for row in rows] == [1.5, None, None]

    # A worker that stood still for a moment has written several.
    for part in (tmp_path / "out").glob("*.parquet"):
        part.unlink()
    gone = headrace(served, "results", job)
    assert (gone.status, gone.out) == (1, "")
    problem = f"3 rows of 3 can no longer be read in {tmp_path / 'out'}"
    assert gone.err == f"headrace: {problem}: run --resume makes them again\n"


@pytest.mark.parametrize("is_asked_for", [True, False], ids=["by run", "over HTTP"])
def test_what_is_gone_of_a_running_job_is_told_too(headrace, tmp_path: Path, is_asked_for: bool) -> None:
    (data := tmp_path / "data").mkdir()
    (out := LocalFolder(tmp_path / "out" if is_asked_for else data / "outputs" / "job_1")).make()
    ledger = new_ledger(data / "headrace.db")
    ledger.create_job(NewJob("job_1", "bulk", "tiny", str(out), "f", 4), [NewShard(0, 4, "/spool")])
    claim = ledger.leases.claim_next("bulk", "worker", 3600)
    assert claim is not None
    tokens = {name: [1] for name in ("prompt_tokens", "cached_tokens", "completion_tokens")}
    texts = dict.fromkeys(("output", "finish_reason", "error"), pa.nulls(1, pa.string()))
    for row in range(2):
        name = f"part-00000-01-{row:03d}.parquet"
        out.write_part(name, table := pa.table({"row": [row], **tokens, **texts}))
        ledger.leases.commit_part(claim, part_summary(name, table))
        out.publish(name)
    ledger.close()
    (out.path / "part-00000-01-000.parquet").unlink()
    gone = headrace(data, "results", "job_1")
    problem = f"headrace: 1 row of 2 can no longer be read in {out}"
    assert gone.err == problem + ": run --resume makes them again" * is_asked_for + "\n"
    assert headrace(data, "cancel", "job_1").status == 0
    assert headrace(data, "results", "job_1").err == problem + ": --overwrite runs all again" * is_asked_for + "\n"
    assert (gone.status, [json.loads(line)["row"] for line in gone.out.splitlines()]) == (1, [1])


def test_a_job_without_a_finished_row_has_none(served: Path, headrace, few, tmp_path):
    # Nobody serves it.
    model = write_model_folder(tmp_path / "unserved")
    (model / "tokenizer.json").write_bytes((MODEL / "tokenizer.json").read_bytes())
    arguments = ["submit", few, "--model", model, "--prompt", "{text}", "--output", tmp_path / "out"]
    job = headrace(served, *arguments).out.strip()
    try:
        assert headrace(served, "results", job, "--head", "2").out == ""
    finally:
        assert headrace(served, "cancel", job).status == 0


def test_the_first_rows_are_read_alone(served, headrace, tmp_path):
    """Equal prompts make a shard: the parts of the second half hold none of the first."""
    lines = [{"text": "It is late."}] * 32 + [{"text": "I want a refund."}] * 32
    tickets = write_lines(tmp_path / "tickets.jsonl", *lines)
    job = headrace(served, *label_arguments(tickets, tmp_path / "out")).out.split()[1]
    whole = headrace(served, "results", job).out.splitlines()
    for part in (tmp_path / "out").glob("*.parquet"):
        if pq.read_table(part, columns=["row"], partitioning=None)["row"][0].as_py() >= 32:
            spoil(part, "text")
    assert_refused(headrace(served, "results", job), "part ", "cannot be read", "remove it to read the others")
    result = headrace(served, "results", job, "--head", "5")
    assert (result.status, result.out.splitlines()) == (0, whole[:5])


def spoil(part: Path, column: str) -> None:
    """Have a column of a part be unreadable."""
    group = pq.ParquetFile(part).metadata.row_group(0)
    chunks = (group.column(number) for number in range(group.num_columns))
    chunk = next(each for each in chunks if each.path_in_schema == column)
    with part.open("r+b") as file:
        file.seek(chunk.dictionary_page_offset or chunk.data_page_offset)
        file.write(b"\xff" * chunk.total_compressed_size)


def test_an_unknown_format_is_refused_with_those_known(served, headrace):
    refused = headrace(served, "results", "job_a", "--format", "csv")
    assert_refused(refused, "headrace: Invalid value for '--format': 'csv' is not one of 'jsonl', 'openai': see")


def test_a_job_is_named_by_its_output_folder_too(served, headrace, few, tmp_path):
    job = headrace(served, *label_arguments(few, tmp_path / "out")).out.split()[1]
    for verb in ("results", "show"):
        assert headrace(served, verb, tmp_path / "out").out == headrace(served, verb, job).out
    assert f"{job} completed" in headrace(served, "watch", tmp_path / "out").out
    assert_refused(headrace(served, "results", tmp_path), f"folder {tmp_path} holds no data set of headrace")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    assert headrace(served, "results", tmp_path / "link").status == 0


def test_jobs_are_json_for_scripts(served, headrace, few, tmp_path):
    job = headrace(served, *label_arguments(few, tmp_path / "out")).out.split()[1]
    shown = json.loads(headrace(served, "show", job, "--json").out)
    assert (shown["id"], shown["state"], shown["output"]) == (job, "completed", str(tmp_path / "out"))
    assert shown["rows"] == {"total": 12, "done": 12, "failed": 0, "from_cache": 0, "truncated": 0}
    assert shown["spec"]["prompt"] == "{text}"
    assert "workers" not in shown
    [listed] = json.loads(headrace(served, "jobs", "--limit", "1", "--json").out)
    assert listed == shown


def test_a_folder_that_was_moved_is_said_to_be(served, headrace, few, tmp_path):
    job = headrace(served, *label_arguments(few, tmp_path / "out")).out.split()[1]
    (tmp_path / "out").rename(tmp_path / "moved")
    other = headrace(tmp_path / "data", "results", tmp_path / "moved")
    assert_refused(
        other, f"is of job {job}, which the ledger here does not have: unless it was deleted, set HEADRACE_DATA_DIR"
    )
    moved = f"folder {tmp_path}/moved was moved or copied from {tmp_path}/out, where job {job} "
    assert_refused(headrace(served, "results", tmp_path / "moved"), moved, "name the job")
    again = headrace(served, *label_arguments(few, tmp_path / "moved"), "--resume")
    assert_refused(again, moved, "move it back, resume it there, or pass --overwrite")
    assert headrace(served, "verify", tmp_path / "moved").status == 0


def test_a_home_folder_is_written_as_a_tilde(served, headrace, few, tmp_path, monkeypatch):
    """No shell makes a folder of the ~ in `--output=~/out`: there would be one of that name in this one."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    shutil.copy(few, tmp_path / "home" / "tickets.jsonl")
    (tmp_path / "home" / "system.txt").write_text("Be brief.")
    monkeypatch.chdir(tmp_path)
    options = ["--model", MODEL, "--prompt", "{text}", "--system", "@~/system.txt", "--max-tokens", "2"]
    assert headrace(served, "run", "~/tickets.jsonl", *options, "--output=~/out").status == 0
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert len(headrace(served, "results", "~/out").out.splitlines()) == 12
    assert headrace(served, "verify", "~/out", "--rows", "1").status == 0
