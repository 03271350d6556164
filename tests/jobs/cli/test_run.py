"""What `headrace run` makes of a file, what it says of it, and what the other commands say then."""

import json
import re
from pathlib import Path
from typing import Any

from headrace.jobs.cli import run as run_module
from headrace.jobs.client.client import Job

from ..running import LABELS, MODEL, label_arguments, results, write_lines


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
    took = re.search(r"time +(\d+\.\d) s, of which \1 s with .*\nrate +([\d.]+) rows/s", run.out)
    assert took is not None
    # By the ledger, which knows when it was submitted.
    assert 0 < float(took[2]) < 1000
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
    source = write_lines(tmp_path / "chats.jsonl", *rows, {"messages": []})
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
