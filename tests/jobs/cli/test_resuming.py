"""An output folder with rows in it: resumed, replaced, or refused with the reason."""

import gzip
import shutil
import sqlite3
from contextlib import closing

import pyarrow.parquet as pq

from headrace.jobs.client.display import counted

from ..running import assert_refused, label_arguments, results


def test_a_finished_run_is_refused_resumed_and_replaced_as_asked(served, headrace, few, tmp_path):
    arguments = label_arguments(few, tmp_path / "out")
    assert headrace(served, *arguments).status == 0
    before = results(tmp_path / "out")
    assert_refused(headrace(served, *arguments), "not empty", "--resume")
    resumed = headrace(served, *arguments, "--resume")
    assert resumed.status == 0
    assert "12 of 12: 0 generated, 12 kept from before, 0 failed" in resumed.out
    replaced = headrace(served, *arguments, "--overwrite", "--limit", "4")
    assert "4 of 4: 4 generated, 0 kept from before" in replaced.out
    assert results(tmp_path / "out")["label"].to_pylist() == before["label"].to_pylist()[:4]


def test_a_data_set_is_not_overwritten_by_a_job_over_its_own_rows(served, headrace, few, tmp_path):
    """It would be gone before it is read."""
    assert headrace(served, *label_arguments(few, tmp_path / "out")).status == 0
    before = results(tmp_path / "out")
    (tmp_path / "link").symlink_to(tmp_path / "out")
    part = next((tmp_path / "out").glob("*.parquet"))
    (tmp_path / "link.parquet").symlink_to(part)
    for given in (tmp_path / "out", tmp_path / "link", part, tmp_path / "link.parquet"):
        refused = headrace(served, *label_arguments(given, tmp_path / "out"), "--overwrite")
        assert_refused(refused, "is in the output folder", "--overwrite would empty")
    assert results(tmp_path / "out").equals(before)
    assert headrace(served, *label_arguments(tmp_path / "out", tmp_path / "again")).status == 0


def test_what_cannot_be_submitted_replaces_nothing(served, headrace, few, tmp_path):
    out = tmp_path / "out"
    job = headrace(served, *label_arguments(few, out)).out.split()[1]
    before = results(out)

    ends_early = tmp_path / "ends early.jsonl.gz"
    ends_early.write_bytes(gzip.compress(few.read_bytes() * 100)[:-10])
    assert_refused(headrace(served, *label_arguments(ends_early, out), "--overwrite"), "cannot be read")

    sink = f"sqlite:///{tmp_path / 'sink.db'}"
    with closing(sqlite3.connect(tmp_path / "sink.db")) as database:
        database.execute("CREATE TABLE headrace_results (job_id TEXT)")
    assert_refused(headrace(served, *label_arguments(few, out), "--overwrite", "--sink", sink), "has no column")

    assert results(out).equals(before)
    assert headrace(served, *label_arguments(few, out), "--resume").out.split()[1] == job


def test_resuming_with_something_else_names_what_differs(served, headrace, few, tmp_path):
    arguments = label_arguments(few, tmp_path / "out")
    assert headrace(served, *arguments).status == 0
    assert_refused(headrace(served, *arguments, "--resume", "--limit", "3"), "another limit", "--overwrite")
    assert_refused(headrace(served, *arguments, "--resume", "--temperature", "1"), "another temperature")
    other = shutil.copy(few, tmp_path / "other.jsonl")
    assert headrace(served, *label_arguments(other, tmp_path / "out"), "--resume").status == 0
    with open(other, "a") as file:
        file.write('{"text": "one more"}\n')
    assert_refused(headrace(served, *label_arguments(other, tmp_path / "out"), "--resume"), "another input")


def test_resuming_nothing_is_a_first_run(served, headrace, few, tmp_path):
    result = headrace(served, *label_arguments(few, tmp_path / "out"), "--resume")
    assert "12 generated, 0 kept from before" in result.out


def test_parts_of_another_ledger_are_not_resumed(served, headrace, few, tmp_path):
    arguments = label_arguments(few, tmp_path / "out")
    assert headrace(served, *arguments).status == 0
    assert_refused(headrace(tmp_path / "other", *arguments, "--resume"), "another ledger", "HEADRACE_DATA_DIR")


def test_a_part_deleted_after_the_end_is_told_and_its_rows_are_made_again(served, headrace, few, tmp_path):
    out = tmp_path / "out"
    arguments = label_arguments(few, out)
    assert headrace(served, *arguments).status == 0
    before = results(out)
    part = next(out.glob("*.parquet"))
    num_rows = pq.read_metadata(part).num_rows
    part.unlink()
    watched = headrace(served, "watch", out)
    assert watched.status == 1
    rows = counted(num_rows, "row")
    assert watched.out.endswith(
        f"gone        {rows}: files were removed from the output meanwhile (run --resume makes them again)\n"
    )
    resumed = headrace(served, *arguments, "--resume")
    assert resumed.status == 0
    assert f"{rows} whose files are gone: made again\n" in resumed.err
    assert f"12 of 12: {num_rows} generated, {12 - num_rows} kept from before, 0 failed" in resumed.out
    assert results(out).select(["row", "label"]).equals(before.select(["row", "label"]))
    assert "12 of 12: 0 generated, 12 kept from before" in headrace(served, *arguments, "--resume").out
