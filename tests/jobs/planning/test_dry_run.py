"""What `headrace dry-run` says about a job, and that it leaves no trace."""

import json
import re

from ..running import LABELS, MODEL, label_arguments


def planned(result) -> dict[str, str]:
    assert result.status == 0, result.err
    return {line[:16].strip(): line[16:] for line in result.out.splitlines()}


def arguments(input, tmp_path) -> list[str]:
    _, *options = label_arguments(input, tmp_path / "out")
    return ["dry-run", *options[: options.index("--output")]]


def test_it_says_what_a_run_would_find_and_writes_nothing(served, headrace, tickets, tmp_path):
    data = tmp_path / "data"
    said = planned(headrace(data, *arguments(tickets, tmp_path), "--limit", "100"))
    assert not (tmp_path / "out").exists()
    assert not data.exists()
    assert said["time"] == "not known before a job with this model has completed"
    run = headrace(served, *label_arguments(tickets, tmp_path / "out"), "--limit", "100")
    job = run.out.split()[1]
    rows = [json.loads(line) for line in headrace(served, "results", job).out.splitlines()]
    prompts = [row["prompt_tokens"] for row in rows]
    assert said["prompt tokens"] == f"{sum(prompts):,}, {max(prompts):,} in the largest prompt"
    assert said["rows"] == "100, 0 at fault, in 4 shards"
    share, ideal = (float(word.rstrip("%,")) for word in said["in prefixes"].replace("ideal", "").split())
    assert f"{share / 100:.0%} of {sum(prompts):,} prompt tokens" in run.err
    assert 50 < share <= ideal < 100
    assert said["context"].startswith("2,048 tokens: all fit")
    assert "tokens: all fit (by default, in " in said["KV memory"]
    # What the same job would take now that one has shown the pace.
    said = planned(headrace(served, *arguments(tickets, tmp_path), "--limit", "100"))
    about, pace = re.fullmatch(r"about (\d+:\d\d) at the pace of job_\w+ \(([\d,]+) tokens/s\)", said["time"]).groups()
    assert int(pace.replace(",", "")) > 0
    assert about < "1:00"


def test_rows_at_fault_are_named_in_the_inputs_order(headrace, tmp_path):
    lines = ['{"text": null}', '{"text": "a ticket"}', "{broken", *['{"text": ""}'] * 5]
    (tmp_path / "bad.jsonl").write_text("\n".join(lines) + "\n")
    said = planned(headrace(tmp_path / "data", *arguments(tmp_path / "bad.jsonl", tmp_path)))
    assert said["rows"].startswith("8, 7 at fault")
    named = {name: text for name, text in said.items() if name.startswith("row ")}
    assert list(named) == ["row 0", "row 2", "row 3", "row 4", "row 5"]
    assert named["row 0"] == "column 'text' is null"
    assert "not valid JSON" in named["row 2"]


def test_an_answer_that_may_be_cut_is_told(headrace, tickets, tmp_path):
    options = ["--model", MODEL, "--prompt", "{text}", "--limit", "3", "--max-tokens", "2040"]
    assert "answer may be cut at" in planned(headrace(tmp_path / "data", "dry-run", tickets, *options))["context"]


def test_what_cannot_run_is_refused_as_it_would_be(headrace, tickets, tmp_path):
    options = ["--model", MODEL, "--prompt", "{txet}", "--choices", ",".join(LABELS)]
    result = headrace(tmp_path / "data", "dry-run", tickets, *options)
    assert result.status == 2
    assert "'txet'" in result.err
