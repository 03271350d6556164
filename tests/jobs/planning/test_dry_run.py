"""What `headrace dry-run` says about a job, and that it leaves no trace."""

import json
import re
from typing import Any

import pytest

from headrace.jobs.cli.dry_run import described
from headrace.jobs.planning.dry_run import Forecast
from headrace.jobs.spec.schemas import JobSpec
from headrace.storage.ledger.overview import Pace

from ...engine.thinking import thinking_copy
from ..running import LABELS, MODEL, assert_refused, label_arguments


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


@pytest.mark.parametrize(
    ("options", "token_bytes", "number"),
    [([], 2560, 1), (["-tp", "2"], 1280, 2), (["-pp", "2"], 1536, 2), (["-tp", "2", "-pp", "2"], 768, 4)],
    ids=["alone", "heads", "layers", "both"],
)
def test_what_processes_that_share_the_model_have_room_for(headrace, tickets, tmp_path, options, token_bytes, number):
    """Each has 2 GiB. Of five layers a stage has three at most."""
    said = planned(headrace(tmp_path / "data", *arguments(tickets, tmp_path), "--limit", "3", *options))
    room = f"{2 * 2**30 // token_bytes:,} tokens: all fit (by default, in float32"
    assert said["KV memory"] == room + ("" if number == 1 else f", in each of {number} processes") + ")"


def test_it_takes_all_options_of_a_run(headrace, tickets, tmp_path):
    _, *options = label_arguments(tickets, tmp_path / "out")
    engine = ["--max-model-len", "100", "--kv-cache-memory-bytes", "2560000", "--watchdog-timeout", "0"]
    job = ["--resume", "--within", "1h", "--sink", f"sqlite:///{tmp_path / 'sink.db'}", "--priority", "3"]
    said = planned(headrace(tmp_path / "data", "dry-run", *options, *engine, *job))
    assert said["context"] == "100 tokens: the largest prompt does not fit"
    assert said["KV memory"] == "1,000 tokens: all fit (in float32)"
    assert [path.name for path in tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--within", "soon"], "--within must be a number and s, m, h or d"),
        (["--sink", "mysql://x"], "--sink cannot be mysql"),
        (["--resume", "--overwrite"], "--resume and --overwrite exclude each other"),
        (["--watchdog-timeout", "0.5"], "--watchdog-timeout must be 0"),
    ],
)
def test_options_that_a_run_refuses_are_refused(headrace, tickets, tmp_path, options, words):
    assert_refused(headrace(tmp_path / "data", *arguments(tickets, tmp_path), *options), words)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-tp", "64"], ["--tensor-parallel-size=64 must divide num_attention_heads"]),
        (["-pp", "64"], ["--pipeline-parallel-size=64 must be at most num_hidden_layers"]),
    ],
)
def test_a_model_that_cannot_be_shared_so_is_refused(headrace, tickets, tmp_path, options, words):
    assert_refused(headrace(tmp_path / "data", *arguments(tickets, tmp_path), *options), *words)


def test_what_cannot_run_is_refused_as_it_would_be(headrace, tickets, tmp_path):
    options = ["--model", MODEL, "--prompt", "{txet}", "--choices", ",".join(LABELS)]
    result = headrace(tmp_path / "data", "dry-run", tickets, *options)
    assert result.status == 2
    assert "'txet'" in result.err


SAMPLED = {"n": 5, "temperature": 0.7}


@pytest.mark.parametrize(
    ("asked", "earlier", "expected"),
    [
        ({}, {}, "about 0:40"),
        # Each answer as long as each of the earlier job's were.
        ({"sampling": SAMPLED}, {}, "about 3:20"),
        ({"sampling": SAMPLED}, {"sampling": SAMPLED}, "about 0:40"),
        # It may be over after three of five.
        ({"sampling": SAMPLED, "vote": True}, {}, "up to 3:20"),
        # The engine answers once, and samples are drawn from that.
        ({"sampling": SAMPLED, "vote": True, "choices": ["a", "b"]}, {}, "about 0:02"),
        ({"sampling": SAMPLED, "choices": ["a", "b"]}, {}, "about 0:10"),
        ({}, {"sampling": SAMPLED, "vote": True, "choices": ["a", "b"]}, "about 0:40"),
    ],
    ids=["once", "several", "as before", "vote", "vote on choices", "choices", "after a vote on choices"],
)
def test_the_tokens_to_come_are_those_that_will_be_asked_for(asked: dict[str, Any], earlier: dict[str, Any], expected):
    """A hundred rows, whose prompts cost nothing, at a hundred tokens a second; the earlier job had forty a row."""
    spec = JobSpec.parse(model=str(MODEL), **asked)
    longest = 2 if spec.choices else 256
    found = Forecast(100, 0, 2048, 10_000, longest, "float32", "queue")
    pace = Pace("job_1", 100.0, 40.0, JobSpec.parse(model=str(MODEL), **earlier).model_dump(mode="json"))
    said = dict(described(found, spec, pace, 3600.0))
    assert said["time"].startswith(f"{expected} at the pace of job_1 (100 tokens/s)")
    assert said["cost"].startswith(expected.rpartition(" ")[0])


def test_choices_are_as_long_as_they_are_whatever_max_tokens_says(headrace, tickets, tmp_path):
    """The longest choice is what a prompt needs room for."""
    options = ["--model", MODEL, "--prompt", "{text}", "--limit", "3", "--max-tokens", "2040", "--choices", "a,b"]
    assert planned(headrace(tmp_path / "data", "dry-run", tickets, *options))["context"].endswith("all fit")


def test_what_is_thought_before_a_choice_counts(headrace, tickets, tmp_path):
    model = thinking_copy(MODEL, tmp_path / "thinker")
    options = ["--model", model, "--prompt", "{text}", "--limit", "3", "--max-tokens", "2040", "--choices", "a,b"]
    plan = [tmp_path / "data", "dry-run", tickets, *options, "--reasoning"]
    assert not planned(headrace(*plan))["context"].endswith("all fit")
    assert planned(headrace(*plan, "--thinking-token-budget", "10"))["context"].endswith("all fit")
