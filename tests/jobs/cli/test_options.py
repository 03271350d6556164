"""Options that one command hands on to another."""

import typer
from typer.core import TyperGroup

from headrace.jobs.cli.app import app
from headrace.jobs.cli.options import engine_options

from ..running import MODEL


def test_the_worker_takes_every_engine_option():
    options = engine_options(
        5,
        5,
        5,
        True,
        True,
        0.5,
        2**20,
        speculative_config='{"num_speculative_tokens": 3}',
        tensor_parallel_size=2,
        pipeline_parallel_size=3,
    )
    given = [option.split("=")[0] for option in options]
    commands = typer.main.get_command(app)
    assert isinstance(commands, TyperGroup)
    worker = commands.commands["worker"]
    assert set(given) <= {name for parameter in worker.params for name in parameter.opts}
    assert {
        "--enforce-eager",
        "--max-model-len",
        "--kv-cache-memory-bytes",
        "--speculative-config",
        "--tensor-parallel-size",
        "--pipeline-parallel-size",
    } <= set(given)
    assert "--enforce-eager" not in engine_options()


def test_a_job_has_its_priority_from_the_start(headrace, tickets, tmp_path):
    options = ["--model", MODEL, "--output", tmp_path / "out", "--prompt", "{text}", "--limit", "3"]
    done = headrace(tmp_path / "data", "submit", tickets, *options, "--priority", "-7")
    assert done.status == 0, done.err
    shown = headrace(tmp_path / "data", "show", done.out.strip()).out
    assert ["priority", "-7"] in [line.split() for line in shown.splitlines()]


def test_what_the_system_refuses_is_said_in_one_line(headrace, tmp_path):
    for input, model, status in (("m" * 5000, MODEL, 2), ("rows.jsonl", "m" * 5000, 1)):
        done = headrace(tmp_path / "data", "dry-run", input, "--model", model)
        assert (done.status, done.out, len(done.err.splitlines())) == (status, "", 1)
        assert "File name too long" in done.err
