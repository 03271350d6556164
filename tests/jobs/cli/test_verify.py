"""`headrace verify`: rows made again are those that are stored, or it says which are not."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from headrace.jobs.client.client import Client
from headrace.jobs.settings import Settings
from headrace.jobs.spec.schemas import JobSpec
from headrace.storage.output.local_folder import LocalFolder
from headrace.storage.output.manifest import OutputMode, read_report
from headrace.storage.readers import open_input

from ..conftest import wait_until
from ..running import LABELS, MODEL, Result, assert_refused, environment, label_arguments, write_lines

Run = Callable[..., Result]
SAMPLED = ("--prompt", "{text} {label}", "--max-tokens", "12", "--temperature", "1.0", "--seed", "7", "--n", "2")


@pytest.fixture(scope="module")
def few(tickets, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("few") / "few.jsonl"
    path.write_text("".join(tickets.read_text().splitlines(keepends=True)[:24]) + '{"text": ""}\n')
    return path


@pytest.fixture
def labelled(served, headrace, few, tmp_path) -> Path:
    """A data set with one row that could not be asked."""
    output = tmp_path / "labelled"
    assert headrace(served, *label_arguments(few, output)).status == 0
    wait_until_tidy(output)
    return output


def wait_until_tidy(output: Path) -> None:
    """A run ends with the last row; its worker writes down how it went a moment later."""
    wait_until(lambda: "state" in (read_report(LocalFolder(output)) or {}), "the manifest says how the job went")


def tamper(output: Path, row: int, **changed: Any) -> None:
    """Change a row of a data set by hand."""
    for path in output.glob("part-*.parquet"):
        table = pq.read_table(path, partitioning=None)
        rows = [each | changed if each["row"] == row else each for each in table.to_pylist()]
        pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)


def leftovers(data_dir: Path) -> list[Path]:
    return [*(data_dir / "verify").rglob("*")]


def test_rows_of_a_job_come_out_as_they_are_stored(served, headrace, labelled):
    result = headrace(served, "verify", labelled, "--rows", 10)
    assert (result.status, result.err) == (0, "")
    lines = [line.split() for line in result.out.splitlines()]
    assert ["generated", "24", "10", "10", "0"] in lines
    assert ["errors", "1", "0", "0", "0"] in lines
    assert "weights   blake2b:" in result.out
    assert "those of the job" in result.out
    assert result.out.endswith("10 rows made again: all equal\n")
    assert not leftovers(served)
    assert "verify" not in headrace(served, "jobs").out


def test_drawn_answers_with_their_probabilities_are_made_again(served, headrace, tmp_path):
    """The seeds go with the rows' numbers; columns that had to give way to ours are put back."""
    rows = [{"custom_id": f"t{n}", "text": f"ticket {n}", "label": {"n": [n, None]}} for n in range(12)]
    output = tmp_path / "out"
    run = ("run", write_lines(tmp_path / "in.jsonl", *rows), "--model", MODEL, "--output", output)
    assert headrace(served, *run, *SAMPLED, "--logprobs", "--top-logprobs", 2).status == 0
    wait_until_tidy(output)
    result = headrace(served, "verify", output, "--fraction", 0.5, "--seed", 3, "--json")
    assert result.status == 0, result.out
    said = json.loads(result.out)
    assert said["differences"] == []
    assert said["rows"]["generated"] == {"rows": 12, "verified": 6, "equal": 6, "different": 0}
    assert said["weights"]["same"] is True
    assert said["weights"]["now"] == json.loads((output / "_headrace.json").read_text())["weights"]


def test_a_prompts_column_may_be_called_as_those_that_gave_way(served, headrace, tmp_path):
    """The second of two runs has what the first one carried as `input_label`."""
    rows = write_lines(tmp_path / "in.jsonl", *({"input_label": f"ticket {n}", "label": n} for n in range(3)))
    alone = write_lines(tmp_path / "alone.jsonl", *({"input_label": f"ticket {n}"} for n in range(3)))
    for number, (input, prompt) in enumerate([(rows, "{input_label} {label}"), (alone, "{input_label}")]):
        output = tmp_path / f"out{number}"
        run = ("run", input, "--model", MODEL, "--output", output, "--prompt", prompt, "--choices", ",".join(LABELS))
        assert headrace(served, *run).status == 0
        wait_until_tidy(output)
        result = headrace(served, "verify", output)
        assert (result.status, result.err) == (0, ""), result.out


def test_it_says_in_what_the_receipts_differ(served, headrace, labelled):
    """A row that another worker made: the first place to look."""
    rows = [row for path in labelled.glob("*.parquet") for row in pq.read_table(path).to_pylist()]
    stored = next(row["receipt"] for row in rows if row["row"] == 3)
    assert stored["weights"] == json.loads((labelled / "_headrace.json").read_text())["weights"]
    assert (stored["seed"], stored["device"]) == (None, "cpu")
    tamper(labelled, 3, receipt=stored | {"dtype": "float16", "attempt": stored["attempt"] + 3})
    result = headrace(served, "verify", labelled, "--fraction", 1)
    assert result.status == 0
    (line,) = [line for line in result.out.splitlines() if line.startswith("changed")]
    assert line == f"changed   dtype was float16 for 1 row, is {stored['dtype']}"


def test_a_data_set_of_before_may_have_a_column_whose_name_is_ours_by_now(served, headrace, tmp_path):
    rows = write_lines(tmp_path / "in.jsonl", *({"text": f"ticket {n}", "votes": n} for n in range(3)))
    output = tmp_path / "out"
    with Client(Settings.from_environment(environment(served))) as client:
        before = JobSpec(model=str(MODEL), prompt="{text}", choices=LABELS)
        client.submit_spec(open_input(rows), before, output, OutputMode.NEW).wait(60, start_worker=False)
    wait_until_tidy(output)
    for path in output.glob("part-*.parquet"):
        table = pq.read_table(path, partitioning=None)
        pq.write_table(table.rename_columns({"input_votes": "votes"}), path)
    result = headrace(served, "verify", output)
    assert (result.status, result.err) == (0, ""), result.out


def test_a_row_that_was_changed_is_named(served, headrace, labelled):
    row = 5
    label = next(label for label in LABELS if label != stored_label(labelled, row))
    tamper(labelled, row, label=label)
    result = headrace(served, "verify", labelled, "--fraction", 1)
    assert result.status == 1
    assert f"\nrow {row} (custom_id '{row}'): label differs from character 0 on: '{label}' before" in result.out
    assert result.out.endswith("1 of 24 rows made again differ\n")


def stored_label(output: Path, row: int) -> str:
    table = pa.concat_tables(pq.read_table(path, partitioning=None) for path in output.glob("part-*.parquet"))
    return next(each["label"] for each in table.to_pylist() if each["row"] == row)


def test_other_weights_are_told_from_those_of_the_run(served, headrace, labelled, tmp_path):
    """By a worker of its own, from the data set alone: the ledger is another."""
    other = Path(shutil.copytree(MODEL, tmp_path / "model"))
    weights = load_file(other / "model.safetensors")
    save_file({name: -weight for name, weight in weights.items()}, other / "model.safetensors")
    result = headrace(tmp_path / "data", "verify", labelled, "--rows", 8, "--model", other)
    assert result.status == 1
    assert "ARE NOT THOSE OF THE JOB" in result.out
    assert " of 8 rows made again differ" in result.out


def test_who_follows_a_job_is_told_that_it_was_answered_by_two_models_of_one_name(served, headrace, labelled):
    with Client(Settings.from_environment(environment(served))) as client:
        job = client.jobs(1)[0]
        client.ledger.note_weights(job.id, "blake2b:of another host")
    assert "\nweights     2 kinds: workers had different files" in headrace(served, "watch", job.id).out
    shown = headrace(served, "show", job.id).out
    assert len([line for line in shown.splitlines() if line.startswith("weights ")]) == 2


def test_answers_from_the_cache_are_counted_apart(served, headrace, few, tmp_path):
    for name in ("first", "second"):
        assert headrace(served, *label_arguments(few, tmp_path / name), "--cache", "--limit", 8).status == 0
    with Client(Settings.from_environment(environment(served))) as client:
        job = client.jobs(1)[0]
        assert job.progress().rows_from_cache == 8
    shown = headrace(served, "show", job.id).out
    assert "8 of 8 (0 failed, 8 from the result cache)" in shown
    result = headrace(served, "verify", job.id, "--rows", 5)
    assert result.status == 0
    assert ["from", "cache", "8", "5", "5", "0"] in [line.split() for line in result.out.splitlines()]


@pytest.mark.parametrize("place", ["the job's folder", "a copy", "a copy without the ledger"])
def test_rows_that_are_gone_are_told_of(place, served, headrace, tickets, tmp_path):
    """Forty rows in two shards, so in two parts, of which one is removed."""
    rows = write_lines(tmp_path / "rows.jsonl", *tickets.read_text().splitlines()[:40])
    folder, data_dir = tmp_path / "labelled", served
    assert headrace(served, *label_arguments(rows, folder)).status == 0
    wait_until_tidy(folder)
    if place != "the job's folder":
        folder = Path(shutil.copytree(folder, tmp_path / "copy"))
    if place == "a copy without the ledger":
        data_dir = tmp_path / "elsewhere"
    first, *others = folder.glob("part-*.parquet")
    assert others
    gone = pq.read_metadata(first).num_rows
    first.unlink()
    result = headrace(data_dir, "verify", folder, "--rows", 3)
    assert (result.status, result.err) == (1, "")
    assert result.out.endswith(f"3 rows made again: all equal\n{gone} of 40 rows are gone: their files were removed\n")
    assert json.loads(headrace(data_dir, "verify", folder, "--rows", 3, "--json").out)["missing_rows"] == gone
    for other in others:
        other.unlink()
    result = headrace(data_dir, "verify", folder)
    assert (result.status, result.out) == (1, "")
    assert re.fullmatch(f"headrace: all 40 rows of job .* are gone: no file of {folder} has one\n", result.err)


def test_what_cannot_be_verified_is_refused(served, headrace, labelled, few, tmp_path):
    assert_refused(headrace(served, "verify", "job_nowhere"), "job_nowhere", "headrace jobs")
    assert_refused(headrace(served, "verify", tmp_path), "holds no data set")
    assert_refused(headrace(served, "verify", labelled, "--rows", 5, "--fraction", 0.5), "--rows and --fraction")
    assert_refused(headrace(served, "verify", labelled, "--fraction", 1.5), "--fraction must be in (0, 1]")
    assert_refused(headrace(served, "verify", labelled, "--fraction", "nan"), "--fraction must be in (0, 1]")
    assert_refused(headrace(served, "verify", labelled, "--model", tmp_path / "nowhere"), "nowhere does not exist")
    empty = write_lines(tmp_path / "empty.jsonl", {"text": ""})
    headrace(served, *label_arguments(empty, tmp_path / "none"))
    assert_refused(headrace(served, "verify", tmp_path / "none"), "none of the 1 rows has an answer")
    unserved = tmp_path / "unserved"
    headrace(unserved, "submit", *label_arguments(few, tmp_path / "waiting")[1:])
    assert_refused(headrace(unserved, "verify", tmp_path / "waiting"), "holds no row of job")
    assert_refused(headrace(served, "verify", tmp_path / "waiting"), "is not in this ledger, and had not completed")
