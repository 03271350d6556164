"""Options that one command hands on to another."""

import json

import pytest
import typer
from typer.core import TyperGroup

from headrace.jobs.cli.app import command_line
from headrace.jobs.cli.options import engine_config, engine_options, worker_options
from headrace.jobs.cli.target_options import target
from headrace.jobs.errors import SpecError

from ...engine.thinking import thinking_copy
from ..running import MODEL

HEADINGS = {
    "run": ["Model", "Input", "Prompt", "Structured output", "Sampling", "Output", "Job", "Engine", "Parallel"],
    "up": ["Model", "Server", "Engine", "Parallel"],
    "worker": ["Model", "Engine", "Parallel"],
}


def test_the_worker_takes_every_engine_option():
    engine = engine_config(
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
    options = worker_options(engine, 5)
    given = [option.split("=")[0] for option in options]
    commands = typer.main.get_command(command_line(["--help"]))
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
        "--watchdog-timeout",
    } <= set(given)
    assert "--enforce-eager" not in engine_options(engine_config())


@pytest.mark.parametrize("command", HEADINGS)
def test_help_has_every_option_under_a_heading(headrace, tmp_path, command):
    commands = typer.main.get_command(command_line(["--help"]))
    assert isinstance(commands, TyperGroup)
    lines = headrace(tmp_path, command, "--help").out.splitlines()
    headings = [line.removesuffix(":") for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert [heading for heading in headings if heading != "Arguments"] == ["Options", *HEADINGS[command]]
    options = [word for line in lines if line.startswith("  -") for word in line.split()[:2] if word.startswith("--")]
    shown = [each for each in commands.commands[command].params if not getattr(each, "hidden", False)]
    assert sorted(options) == sorted(["--help", *(name for each in shown for name in each.opts if name[:2] == "--")])
    # A new option of these commands belongs to a group.
    last = lines.index("  -h, --help  Show this message and exit.")
    assert lines[last - 1 : last + 2 : 2] == ["Options:", ""]


@pytest.mark.parametrize("words", [[], ["run"], ["jobs"], ["keys"], ["keys", "create"], ["delete"]])
def test_help_is_there_by_its_short_name(words, headrace, tmp_path):
    short, long = (headrace(tmp_path, *words, option) for option in ("-h", "--help"))
    assert (short.status, short.out, short.err) == (0, long.out, "")
    assert short.out.startswith(f"Usage: {' '.join(['headrace', *words])} ")


@pytest.mark.parametrize("prompt", ["Is it urgent?", "{{text}}"])
def test_a_prompt_that_asks_all_rows_the_same_is_remarked_on(prompt, headrace, few, tmp_path):
    asked = headrace(tmp_path / "data", "dry-run", few, "--model", MODEL, "--limit", "2", "--prompt", prompt)
    assert asked.status == 0
    assert asked.err == "headrace: --prompt names no column, as {text} would: all rows are asked the same\n"


def test_a_line_break_that_is_none_is_remarked_on(headrace, few, tmp_path):
    command = [tmp_path / "data", "dry-run", few, "--model", MODEL, "--limit", "2"]
    asked = headrace(*command, "--system", r"Be brief.\n", "--prompt", r"Label it:\n\n{text}")
    assert asked.status == 0
    assert asked.err.splitlines() == [
        f"headrace: {option} has a backslash and an n, not a line break: in a shell $'…\\n…' has one"
        for option in ("--prompt", "--system")
    ]
    (tmp_path / "system.txt").write_text(r"Ends with \n")
    prompt = r"What is \nabla in {text}?" + "\n"
    silent = headrace(*command, "--system", f"@{tmp_path / 'system.txt'}", "--prompt", prompt)
    assert (silent.status, silent.err) == (0, "")


def test_one_choice_is_remarked_on(headrace, few, tmp_path):
    command = [tmp_path / "data", "dry-run", few, "--model", MODEL, "--limit", "2", "--prompt", "{text}", "--choices"]
    asked = headrace(*command, "billing;shipping")
    assert asked.status == 0
    assert asked.err == (
        "headrace: --choices is one choice, 'billing;shipping', for all answers: write commas between several\n"
    )
    assert headrace(*command, "billing", "--choices", "shipping").err == ""


def test_a_budget_that_leaves_nothing_for_the_answer_is_remarked_on(headrace, few, tmp_path):
    model = thinking_copy(MODEL, tmp_path / "thinker")
    command = [tmp_path / "data", "dry-run", few, "--model", model, "--limit", "2", "--prompt", "{text}", "--reasoning"]
    asked = headrace(*command, "--thinking-token-budget", "300", "--max-tokens", "300")
    assert asked.status == 0
    assert asked.err == "headrace: --thinking-token-budget 300 leaves nothing of --max-tokens 300 for the answer\n"
    for enough in (["--thinking-token-budget", "300"], ["--thinking-token-budget", "300", "--choices", "a,b"]):
        silent = headrace(*command, *enough)
        assert (silent.status, silent.err) == (0, "")


def test_what_a_models_authors_advise_is_told_of_where_a_job_is_greedy(headrace, few, tmp_path):
    model = thinking_copy(MODEL, tmp_path / "thinker")
    (model / "generation_config.json").write_text('{"eos_token_id": 4, "top_k": 20, "temperature": 0.6}')
    options = ["--model", model, "--limit", "2", "--prompt", "{text}"]
    advised = "advise --temperature 0.6 --top-k 20"

    def sampling(*more: str) -> str:
        plan = headrace(tmp_path / "data", "dry-run", few, *options, *more)
        assert (plan.status, plan.err) == (0, "")
        return next(line[16:] for line in plan.out.splitlines() if line.startswith("sampling"))

    assert sampling() == f"greedy; the model's authors {advised}"
    assert sampling("--reasoning", "--choices", "a,b") == f"greedy; the model's authors {advised}"
    assert sampling("--choices", "a,b") == "greedy"
    assert sampling("--temperature", "0.25") == "temperature 0.25"
    submit = ["submit", few, *options, "--output"]
    thinks = headrace(tmp_path / "data", *submit, tmp_path / "out", "--reasoning")
    assert thinks.err.splitlines()[0] == f"headrace: the model thinks greedily; its authors {advised}"
    for number, silent in enumerate((["--reasoning", "--temperature", "0.6"], [])):
        assert advised not in headrace(tmp_path / "data", *submit, tmp_path / f"out{number}", *silent).err


@pytest.mark.parametrize("said", ['{"top_p": 7}', "{}", '{"temperature": 0, "top_k": 3}'])
def test_a_job_goes_without_advice_that_there_is_not(said, headrace, few, tmp_path):
    model = thinking_copy(MODEL, tmp_path / "thinker")
    (model / "generation_config.json").write_text(said)
    plan = headrace(tmp_path / "data", "dry-run", few, "--model", model, "--limit", "2", "--prompt", "{text}")
    assert plan.status == 0, plan.err
    assert "sampling        greedy\n" in plan.out


def test_a_text_that_is_a_files_name_is_said_to_be_text(headrace, few, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my prompt.txt").write_text("Label it: {text}")
    command = ["dry-run", few, "--model", MODEL, "--limit", "2"]
    meant = headrace(tmp_path / "data", *command, "--system", "my prompt.txt", "--prompt", "my prompt.txt")
    advice = """pass --prompt "$(cat 'my prompt.txt')" for its content"""
    assert meant.status == 0
    assert meant.err.splitlines() == [
        f"headrace: --prompt is the text 'my prompt.txt', not the file of that name: {advice}",
        "headrace: --system is the text 'my prompt.txt', not the file of that name: "
        "pass --system '@my prompt.txt' for its content",
    ]
    silent = headrace(tmp_path / "data", *command, "--system", "@my prompt.txt", "--prompt", "{text}" + "x" * 5000)
    assert (silent.status, silent.err) == (0, "")


def test_a_files_byte_order_mark_is_not_of_its_text(headrace, few, tmp_path):
    (tmp_path / "system.txt").write_text("\ufeffBe brief.\r\n", encoding="utf-8")
    (tmp_path / "schema.json").write_text('\ufeff{"type": "integer"}', encoding="utf-8")
    options = ["--system", f"@{tmp_path / 'system.txt'}", "--json-schema", tmp_path / "schema.json"]
    command = ["submit", few, "--model", MODEL, "--prompt", "{text}", "--output", tmp_path / "out", *options]
    job = headrace(tmp_path / "data", *command)
    assert job.status == 0, job.err
    shown = headrace(tmp_path / "data", "show", job.out.strip()).out
    assert [line for line in shown.splitlines() if line.startswith("system")] == ['system          "Be brief."']


def test_choices_are_those_of_all_options_and_of_a_files_lines(headrace, few, tmp_path, monkeypatch):
    """Of two options the last one would be the only choice, and every row would have it with certainty."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "labels.txt").write_text("shipping, delayed\r\n\nother\n")
    options = ["--choices", 'billing, "refund, partial"', "--choices", "@labels.txt", "--choices", 'say "no"']
    job = headrace(
        tmp_path / "data", "submit", few, "--model", MODEL, "--prompt", "{text}", "--output", "out", *options
    )
    shown = headrace(tmp_path / "data", "show", job.out.strip()).out
    said = next(line for line in shown.splitlines() if line.startswith("choices"))
    assert json.loads(said.removeprefix("choices")) == [
        *("billing", "refund, partial", "shipping, delayed", "other", 'say "no"')
    ]


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


def test_a_secret_of_the_environment_is_there_for_jobs_without_a_webhook_too(monkeypatch):
    monkeypatch.setenv("WEBHOOK_SECRET", "of all jobs")
    assert target("out", webhook_secret="of all jobs").terms.webhook is None
    told = target("out", webhook="https://example.com/", webhook_secret="of all jobs").terms.webhook
    assert told is not None
    assert told.secret == "of all jobs"
    with pytest.raises(SpecError, match="webhook_secret signs what is sent to webhook"):
        target("out", webhook_secret="another")
