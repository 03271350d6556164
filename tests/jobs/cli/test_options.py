"""Options that one command hands on to another."""

import typer
from typer.core import TyperGroup

from headrace.jobs.cli.app import app
from headrace.jobs.cli.options import engine_options


def test_the_worker_takes_every_engine_option():
    given = [option.split("=")[0] for option in engine_options(max_model_len=5, enforce_eager=True)]
    commands = typer.main.get_command(app)
    assert isinstance(commands, TyperGroup)
    worker = commands.commands["worker"]
    assert set(given) <= {name for parameter in worker.params for name in parameter.opts}
    assert "--enforce-eager" in given
    assert "--enforce-eager" not in engine_options()
