"""The command line as its users meet it: what it refuses and how, what it prints, what it leaves."""

import gzip
import json
import shutil
import sqlite3
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from headrace.engine.checkpoints.model_config import SUPPORTED_ARCHITECTURES
from headrace.jobs.cli import run as run_module
from headrace.jobs.client import Job

from ..models import write_model_folder
from ..running import LABELS, MODEL, Result, label_arguments

Run = Callable[..., Result]


@pytest.fixture(scope="module")
def few(tickets, tmp_path_factory) -> Path:
    """Twelve tickets."""
    path = tmp_path_factory.mktemp("few") / "few.jsonl"
    path.write_text("".join(tickets.read_text().splitlines(keepends=True)[:12]))
    return path


def results(folder: Path) -> pa.Table:
    return ds.dataset(sorted(map(str, folder.glob("*.parquet")))).to_table().sort_by("row")


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def assert_refused(result: Result, *words: str) -> None:
    """One line on standard error that has these words; exit status 2; nothing on standard output."""
    assert result.status == 2, result
    assert result.out == ""
    assert result.err.startswith("headrace: "), result.err
    assert result.err.count("\n") == 1, result.err
    for word in words:
        assert word in result.err, (word, result.err)


@pytest.fixture
def refused(served, headrace, few, tmp_path) -> Callable[..., None]:
    """Runs tickets with other arguments, and expects to be refused without a trace in the file system."""

    def run(*more: str | Path, words: Sequence[str], input: Path = few, model: Path = MODEL, prompt="{text}") -> None:
        output = tmp_path / "out"
        required = ["run", input, "--model", model, "--output", output]
        assert_refused(headrace(served, *required, *(["--prompt", prompt] if prompt else []), *more), *words)
        assert not output.exists()

    return run


# What can be known before any work.


def test_a_missing_file_is_refused(refused, tmp_path):
    refused(input=tmp_path / "nowhere.jsonl", words=["nowhere.jsonl", "does not exist"])


def test_an_unknown_format_is_refused_with_those_known(refused, tmp_path):
    refused(input=write(tmp_path / "input.xlsx", "x"), words=[".xlsx", ".jsonl", ".csv", ".parquet"])


@pytest.mark.parametrize("name", ["empty.jsonl", "empty.csv", "empty.parquet"])
def test_an_empty_file_is_refused(refused, tmp_path, name):
    (tmp_path / name).touch()
    refused(input=tmp_path / name, words=[name])


def test_an_unreadable_row_group_is_named_and_nothing_is_left(refused, tmp_path):
    """That is found out while the job is planned, when the output folder is already taken."""
    path = tmp_path / "tickets.parquet"
    texts = [f"{number:01000}" for number in range(400)]
    pq.write_table(pa.table({"text": texts}), path, row_group_size=100, use_dictionary=False, compression=None)
    start = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\xff" * 200)
    refused(input=path, words=["tickets.parquet", "row group 2", "cannot be read"])


@pytest.mark.parametrize(
    ("output", "words"),
    [
        # A store whose library is none of ours.
        ("oci://bucket/labels", ["cannot write to output oci://bucket/labels", "Install ocifs"]),
        ("nosuch://bucket/labels", ["cannot write to output nosuch://bucket/labels", "Protocol not known"]),
        ("s3://key:secret@bucket/labels", ["has a user and a password", "environment"]),
        ("s3:/bucket/labels", ["has lost a slash"]),
    ],
)
def test_an_output_url_that_cannot_be_is_refused(served, headrace, few, tmp_path, monkeypatch, output, words):
    monkeypatch.chdir(tmp_path)
    jobs = headrace(served, "jobs").out
    result = headrace(served, "run", few, "--model", MODEL, "--prompt", "{text}", "--output", output)
    assert_refused(result, *words)
    assert "secret" not in result.err
    assert not list(tmp_path.iterdir())
    assert headrace(served, "jobs").out == jobs


def test_a_missing_template_column_is_named_with_those_there_are(refused):
    refused(prompt="{txet}", words=["'txet'", "ticket_id, text, category"])


@pytest.mark.parametrize("template", ["{text", "text}", "{}", "{text!r}"])
def test_a_malformed_template_is_refused(refused, template):
    refused(prompt=template, words=["--prompt", template])


def test_an_input_that_says_nothing_to_ask_is_refused_with_advice(refused):
    refused(prompt=None, words=["neither a 'messages' nor a 'prompt' column", "--prompt '{ticket_id}'"])


def test_no_model_folder_is_refused(refused, tmp_path):
    refused(model=tmp_path / "nowhere", words=[str(tmp_path / "nowhere"), "does not exist"])
    (tmp_path / "empty").mkdir()
    refused(model=tmp_path / "empty", words=["not a model folder", "config.json"])


def test_a_missing_tokenizer_is_refused(refused, tmp_path):
    folder = write_model_folder(tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    refused(model=folder, words=["no tokenizer.json"])


def test_an_unsupported_architecture_is_named_with_those_supported(refused, tmp_path):
    folder = write_model_folder(tmp_path / "model", architectures=["MambaForCausalLM"])
    refused(model=folder, words=["MambaForCausalLM", *SUPPORTED_ARCHITECTURES])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", "{", ["config.json", "not valid JSON"]),
        ("config.json", "[]", ["config.json", "JSON object"]),
        ("config.json", '{"architectures": ["LlamaForCausalLM"]}', ["config.json", "no field"]),
        ("tokenizer.json", "{", ["tokenizer.json"]),
    ],
)
def test_a_damaged_model_folder_is_refused(refused, tmp_path, name, content, words):
    folder = write_model_folder(tmp_path / "model")
    (folder / name).write_text(content)
    refused(model=folder, words=words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--choices", ""], ["choices"]),
        (["--choices", "a,,b"], ["choices", "empty"]),
        (["--choices", "a,b,a"], ["choices", "different"]),
        (["--top-p", "0"], ["top_p", "(0, 1]"]),
        (["--top-p", "1.5"], ["top_p", "(0, 1]"]),
        (["--top-p", "much"], ["--top-p", "number"]),
        (["--temperature", "-1"], ["temperature", "≥ 0"]),
        (["--top-k", "-1"], ["top_k", "≥ 0"]),
        (["--min-p", "2"], ["min_p", "[0, 1]"]),
        (["--presence-penalty", "3"], ["presence_penalty", "[-2, 2]"]),
        (["--frequency-penalty", "nan"], ["frequency_penalty", "[-2, 2]"]),
        (["--repetition-penalty", "0"], ["repetition_penalty", "> 0"]),
        (["--stop", "END", "--stop", ""], ["stop", "empty"]),
        (["--choices", "a,b", "--stop", "c"], ["stop", "choices"]),
        (["--temperature", "nan"], ["temperature", "≥ 0", "nan"]),
        (["--n", "0"], ["n must be ≥ 1, not 0"]),
        (["--n", "2"], ["n must be 1 with temperature 0"]),
        (["--min-tokens", "300"], ["min_tokens", "max_tokens", "300"]),
        (["--stop-token-ids", "1,x"], ["stop_token_ids.1", "integer", "'x'"]),
        (["--stop-token-ids", "999999"], ["stop_token_ids", "999999", "vocabulary"]),
        (["--logit-bias", "5:101"], ["logit_bias", "[-100, 100]", "101"]),
        (["--logit-bias", "5"], ["--logit-bias", "ID:BIAS", "5"]),
        (["--logit-bias", "five:1"], ["logit_bias", "integer", "five"]),
        (["--logit-bias", "999999:1"], ["logit_bias", "999999", "vocabulary"]),
        (["--top-logprobs", "2"], ["top_logprobs", "without logprobs"]),
        (["--logprobs", "--top-logprobs", "21"], ["top_logprobs", "20", "21"]),
        (["--best-of", "2"], ["--best-of", "headrace run --help"]),
        (["--max-tokens", "0"], ["max_tokens"]),
        (["--seed", "-1"], ["seed"]),
        (["--limit", "0"], ["--limit"]),
        (["--dtype", "int3"], ["dtype", "auto, float32"]),
        (["--quantization", "int3"], ["quantization", "'int8'"]),
        (["--kv-cache-dtype", "fp7"], ["kv_cache_dtype", "fp8_e5m2", "'fp7'"]),
        (["--max-num-seqs", "0"], ["--max-num-seqs"]),
        (["--system", "@nowhere.txt"], ["--system", "nowhere.txt"]),
        (["--resume", "--overwrite"], ["--resume", "--overwrite"]),
        (["--webhook", "ftp://a/"], ["webhook.url", "http"]),
        (["--temprature", "1"], ["--temprature", "headrace run --help"]),
        (["one", "too", "many"], ["one", "headrace run --help"]),
    ],
    ids=" ".join,
)
def test_an_option_that_cannot_be_is_refused_and_named(refused, options, words):
    refused(*options, words=words)


def test_text_that_is_no_text_is_refused(refused):
    refused("--system", "caf\udce9", words=["system: is not valid UTF-8"])
    refused(prompt="{text} caf\udce9", words=["prompt: is not valid UTF-8"])
    refused("--choices", "caf\udce9,tea", words=["choices: is not valid UTF-8"])


def test_a_missing_argument_or_command_is_refused_in_one_line(served, headrace):
    assert_refused(headrace(served, "run"), "--model", "headrace run --help")
    assert_refused(headrace(served, "show"), "JOB", "headrace show --help")
    assert_refused(headrace(served, "rnu"), "rnu", "headrace --help")


def test_an_output_folder_with_something_in_it_is_refused(served, headrace, few, tmp_path):
    (tmp_path / "keep.txt").write_text("mine")
    arguments = label_arguments(few, tmp_path)
    assert_refused(headrace(served, *arguments), "not empty", "--resume", "--overwrite")
    assert_refused(headrace(served, *arguments, "--overwrite"), "keep.txt", "not written by headrace")
    assert_refused(headrace(served, *arguments, "--resume"), "no headrace job to resume")
    assert [path.name for path in tmp_path.iterdir()] == ["keep.txt"]


def test_an_output_that_is_a_file_is_refused(served, headrace, few, tmp_path):
    (tmp_path / "file").touch()
    assert_refused(headrace(served, *label_arguments(few, tmp_path / "file")), "not a folder")


def test_an_unknown_job_is_refused(served, headrace):
    for command in ("show", "results", "watch", "pause", "resume", "cancel", "retry", "delete"):
        assert_refused(headrace(served, command, "job_x"), "'job_x' is unknown", "headrace jobs")


def test_settings_that_cannot_be_are_refused(headrace, served, tmp_path):
    (tmp_path / "file").touch()
    assert_refused(headrace(tmp_path / "file/data", "jobs"), "HEADRACE_DATA_DIR", str(tmp_path / "file/data"))
    assert_refused(headrace(served, "jobs", HEADRACE_SHARD_ROWS="many"), "HEADRACE_SHARD_ROWS=many")
    assert_refused(headrace(served, "jobs", HEADRACE_SHARD_ROW="1"), "did you mean HEADRACE_SHARD_ROWS")


def test_a_worker_that_cannot_start_says_why(served, headrace, tmp_path):
    assert_refused(headrace(served, "worker", "--model", tmp_path / "nowhere"), "nowhere", "does not exist")


def test_a_worker_that_refuses_ends_the_run_with_its_words(headrace, few, tmp_path):
    """Known only to the worker: this run's engine cannot have so long a context."""
    arguments = label_arguments(few, tmp_path / "out")
    result = headrace(tmp_path / "data", *arguments, "--max-model-len", "1000000")
    assert result.status == 1
    assert "max_model_len=1000000 exceeds the model's context" in result.err.splitlines()[-1]
    assert "Traceback" not in result.err


# What belongs to a row.


def test_bad_rows_are_in_the_data_set_with_their_error(served, headrace, few, tmp_path):
    good = json.loads(few.read_text().splitlines()[0])
    long = {"text": "word " * 3000, "custom_id": "long"}
    lines = [good, "{broken", {"text": None}, "", {"other": 1}, {"text": " "}, long, good]
    arguments = label_arguments(write(tmp_path / "mixed.jsonl", *lines), tmp_path / "out")
    result = headrace(served, *arguments)
    assert result.status == 0, result.err
    assert "7 of 7: 7 generated, 0 kept from before, 5 failed" in result.out
    rows = results(tmp_path / "out").to_pylist()
    assert [row["row"] for row in rows] == list(range(7))
    assert [row["error"] for row in rows] == [
        None,
        "line 2: not valid JSON: Expecting property name enclosed in double quotes at column 2",
        "column 'text' is null",
        "column 'text' is missing",
        "prompt is empty",
        rows[5]["error"],
        None,
    ]
    assert "the model's context holds 2048" in rows[5]["error"]
    assert rows[5]["custom_id"] == "long"
    for row in rows:
        assert (row["label"] is None) == (row["error"] is not None)


def test_a_run_without_a_single_answer_fails(served, headrace, tmp_path):
    arguments = label_arguments(write(tmp_path / "bad.jsonl", {"text": ""}, {"text": " "}), tmp_path / "out")
    result = headrace(served, *arguments)
    assert result.status == 1
    assert "2 failed" in result.out


# What it answers.


def test_the_version(served, headrace):
    result = headrace(served, "--version")
    assert (result.status, result.err) == (0, "")
    assert result.out.startswith("headrace 0.")


def test_help_names_every_command(served, headrace):
    for arguments in ([], ["--help"]):
        result = headrace(served, *arguments)
        assert result.status == 0
        for command in ("run", "submit", "watch", "pause", "retry", "jobs", "show", "results", "worker"):
            assert f"\n  {command} " in result.out


@pytest.fixture(scope="module")
def formats(few, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("formats")
    table = pa.Table.from_pylist([json.loads(line) for line in few.read_text().splitlines()])
    pq.write_table(table, folder / "few.parquet")
    pa.csv.write_csv(table, folder / "few.csv")
    packed = folder / "few.jsonl.gz"
    packed.write_bytes(gzip.compress(few.read_bytes()))
    several = folder / "several"
    several.mkdir()
    for name, part in (("a", table.slice(0, 7)), ("b", table.slice(7))):
        pq.write_table(part, several / f"{name}.parquet")
    formats = {"jsonl": few, "csv": folder / "few.csv", "parquet": folder / "few.parquet"}
    return {**formats, "gzip": packed, "folder": several}


def test_the_format_of_the_input_does_not_matter(served, headrace, formats, tmp_path):
    tables = {}
    for name, path in formats.items():
        assert headrace(served, *label_arguments(path, tmp_path / name)).status == 0
        tables[name] = results(tmp_path / name)
    first = tables.pop("jsonl")
    assert first.column_names[:5] == ["row", "custom_id", "ticket_id", "text", "category"]
    assert set(first["label"].to_pylist()) <= set(LABELS)
    for table in tables.values():
        assert table.column_names == first.column_names
        for column in ("row", "ticket_id", "text", "category", "label", "prompt_tokens", "error"):
            assert table[column].to_pylist() == first[column].to_pylist()


@pytest.fixture
def shop_database(few, tmp_path) -> str:
    """A database with the same tickets."""
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database, database:
        database.execute("create table tickets (ticket_id text, text text)")
        rows = [json.loads(line) for line in few.read_text().splitlines()]
        database.executemany("insert into tickets values (:ticket_id, :text)", rows)
    return f"sqlite:///{tmp_path / 'shop.db'}"


def test_rows_from_a_pipe_and_from_a_query(served, headrace, few, shop_database, tmp_path, monkeypatch):
    def labels(name: str, *arguments: str) -> list[str]:
        command, _, *options = label_arguments(few, tmp_path / name)
        result = headrace(served, command, *options, *arguments)
        assert result.status == 0, result.err
        return results(tmp_path / name)["label"].to_pylist()

    expected = labels("file", str(few))
    with few.open() as piped, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", piped)
        assert labels("pipe", "-") == expected
    query = write(tmp_path / "query.sql", "select ticket_id, text from tickets order by rowid")
    assert labels("query", "--sql", shop_database, "--query", f"@{query}") == expected
    assert not list((served / "inputs").glob("*"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["pass an INPUT, or --sql and --query"]),
        (["rows.csv", "--sql", "sqlite://", "--query", "select 1"], ["one of the two"]),
        (["--sql", "sqlite://"], ["--sql and --query belong together"]),
        (["--sql", "sqlite://", "--query", "select * from nothing"], ["--query failed", "nothing"]),
        (["--sql", "sqlite://", "--query", "@nowhere.sql"], ["--query @nowhere.sql cannot be read"]),
        (["nosuch://host/rows.csv"], ["nosuch://host/rows.csv", "Protocol not known"]),
    ],
)
def test_an_input_that_cannot_be_told_is_refused(served, headrace, tmp_path, arguments, words):
    options = ["--model", MODEL, "--prompt", "{text}", "--output", tmp_path / "out"]
    assert_refused(headrace(served, "run", *arguments, *options), *words)
    assert not (tmp_path / "out").exists()


def test_the_summary_and_what_jobs_show_and_results_say(served, headrace, few, tmp_path):
    run = headrace(served, *label_arguments(few, tmp_path / "out"), "--limit", "5")
    assert run.status == 0
    words = run.out.split()
    job = words[1]
    assert "5 of 5: 5 generated, 0 kept from before, 0 failed" in run.out
    for name in ("rows/s", "tokens/s", "hit rate"):
        assert name in run.out
    listed = headrace(served, "jobs", "--limit", "1").out.splitlines()
    assert len(listed) == 2
    assert listed[1].split()[:4] == [job, "completed", "5/5", "0"]
    shown = headrace(served, "show", job).out
    for word in (job, "completed", "5 of 5 (0 failed)", str(tmp_path / "out"), '"billing"', '"temperature": 0.0'):
        assert word in shown
    rows = [json.loads(line) for line in headrace(served, "results", job).out.splitlines()]
    assert [row["row"] for row in rows] == [0, 1, 2, 3, 4]
    assert rows[0]["label"] in LABELS
    assert rows[0]["probabilities"].keys() == set(LABELS)
    head = headrace(served, "results", job, "--head", "2").out.splitlines()
    assert [json.loads(line) for line in head] == rows[:2]


def test_rows_that_are_answered_before_anybody_looks_are_this_runs(served, headrace, few, tmp_path, monkeypatch):
    submitted = run_module._submitted

    def submitted_and_done(*arguments: Any) -> Job:
        job = submitted(*arguments)
        job.wait(60, start_worker=False)
        return job

    monkeypatch.setattr(run_module, "_submitted", submitted_and_done)
    arguments = [*label_arguments(few, tmp_path / "out"), "--limit", "5"]
    run = headrace(served, *arguments)
    assert "5 of 5: 5 generated, 0 kept from before, 0 failed" in run.out
    assert "done before" not in run.err
    again = headrace(served, *arguments, "--resume")
    assert "5 of 5: 0 generated, 5 kept from before, 0 failed" in again.out
    assert "5 done before" in again.err
    keyed = [*label_arguments(few, tmp_path / "keyed"), "--limit", "5", "--idempotency-key", str(tmp_path)]
    for kept in (0, 5):
        assert f"{kept} kept from before" in headrace(served, *keyed).out


def test_messages_go_through_the_chat_template(served, headrace, few, tmp_path):
    tickets = [json.loads(line) for line in few.read_text().splitlines()]
    system = (label_arguments(few, tmp_path)[label_arguments(few, tmp_path).index("--system") + 1])[1:]
    text = Path(system).read_text().strip()
    rows = [
        {"messages": [{"role": "system", "content": text}, {"role": "user", "content": row["text"]}]} for row in tickets
    ]
    source = write(tmp_path / "chats.jsonl", *rows, {"messages": []})
    options = ["--model", MODEL, "--choices", ",".join(LABELS), "--output"]
    assert headrace(served, "run", source, *options, tmp_path / "chats").status == 0
    assert headrace(served, *label_arguments(few, tmp_path / "texts")).status == 0
    chats, texts = results(tmp_path / "chats"), results(tmp_path / "texts")
    assert chats["error"].to_pylist() == [None] * 12 + ["column 'messages' must be a non-empty list"]
    for column in ("label", "prompt_tokens"):
        assert chats[column].to_pylist()[:12] == texts[column].to_pylist()


def test_text_is_generated_where_there_are_no_choices(served, headrace, few, tmp_path):
    def generate(name: str, *options: str) -> list[dict[str, Any]]:
        arguments = ["run", few, "--model", MODEL, "--prompt", "{text}", "--max-tokens", "6", "--limit", "8"]
        result = headrace(served, *arguments, "--output", tmp_path / name, *options)
        assert result.status == 0, result.err
        rows: list[dict[str, Any]] = results(tmp_path / name).to_pylist()
        return rows

    def texts(rows: list[dict[str, Any]]) -> list[str]:
        return [row["output"] for row in rows]

    greedy = generate("greedy")
    assert all(row["label"] is None and row["confidence"] is None for row in greedy)
    assert {row["finish_reason"] for row in greedy} <= {"stop", "length"}
    assert all(1 <= row["completion_tokens"] <= 6 for row in greedy)
    assert "probabilities" not in greedy[0]
    stop = texts(greedy)[0][2:4]
    assert texts(generate("stopped", "--stop", "never to be", "--stop", stop)) == [
        text.split(stop)[0] for text in texts(greedy)
    ]
    (answer,) = set(texts(generate("biased", "--logit-bias", "40:100,41:-100", "--ignore-eos")))
    assert answer
    several = generate("several", "--temperature", "1", "--n", "3", "--logprobs", "--top-logprobs", "2")
    assert all(len(row["outputs"]) == 3 and row["outputs"][0] == row["output"] for row in several)
    assert all(len(token["top"]) == 2 for row in several for token in row["logprobs"])
    hot = ("--temperature", "5", "--seed")
    assert texts(generate("seed 1", *hot, "1")) == texts(generate("seed 1 again", *hot, "1"))
    assert texts(generate("seed 2", *hot, "2")) != texts(generate("seed 1 once more", *hot, "1"))


# Resuming and replacing.


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


def test_a_part_deleted_after_the_end_is_told(served, headrace, few, tmp_path):
    arguments = label_arguments(few, tmp_path / "out")
    assert headrace(served, *arguments).status == 0
    next((tmp_path / "out").glob("*.parquet")).unlink()
    assert_refused(headrace(served, *arguments, "--resume"), "is gone", "--overwrite")
