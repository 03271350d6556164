"""Which commands there are, and how their errors reach the user: one line, exit status 2 or 1, no traceback."""

import logging
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, NoReturn

import typer

from .imports import importing
from .option_groups import GroupedCommand

# Each in the module of its name, but for those of `_MODULES`. Only the one that is asked for is imported.
_COMMANDS = (
    *("run", "run-batch", "submit", "dry-run", "size", "watch", "jobs", "queues", "show", "results", "verify"),
    *("pause", "resume", "cancel", "priority", "retry", "delete", "stream", "worker", "serve", "up"),
    *("keys", "tenants"),
)
_MODULES = {
    "submit": "run",
    **dict.fromkeys(("show", "results"), "inspect"),
    **dict.fromkeys(("pause", "resume", "cancel", "priority", "retry"), "verbs"),
}
# Those with so many options that they stand under headings.
_GROUPED = ("run", "run-batch", "submit", "dry-run", "size", "verify", "worker", "serve", "up")


def command_line(arguments: Sequence[str]) -> typer.Typer:
    """The commands that `arguments`, at least one, are about: the one they name, or all, as for `--help`.

    The others are not imported: with all of them a program takes 1.7 s of processor to start, `--version` alone 0.15 s.
    """
    app = typer.Typer(
        name="headrace",
        help="Batch prompts through your own GPUs: a file in, a Parquet data set out, each row exactly once.",
        add_completion=False,
        # Those of all commands.
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_options)
    with importing():
        for name in _named(arguments):
            _add(app, name)
    return app


def _named(arguments: Sequence[str]) -> Sequence[str]:
    # Nothing stands before a command: --help and --version are all that there is without one.
    if arguments[0] in _COMMANDS:
        return arguments[:1]
    return () if arguments[0] == "--version" else _COMMANDS


def _add(app: typer.Typer, name: str) -> None:
    identifier = name.replace("-", "_")
    found = getattr(import_module(f".{_MODULES.get(name, identifier)}", __package__), identifier)
    if isinstance(found, typer.Typer):
        app.add_typer(found)
    else:
        cls = GroupedCommand if name in _GROUPED else None
        # A negative number is a priority, not an option.
        settings = {"ignore_unknown_options": True} if name == "priority" else None
        app.command(name, cls=cls, context_settings=settings)(found)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"headrace {version('headrace')}")
        raise typer.Exit


def _options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Set up what all commands share."""


def run_command(arguments: Sequence[str]) -> NoReturn:
    """Ends the process, with `main`'s exit status. Raises `KeyboardInterrupt`."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    arguments = arguments or ["--help"]
    try:
        sys.exit(command_line(arguments)(arguments, prog_name="headrace", standalone_mode=False))
    except Exception as error:
        # Its module knows the errors of all libraries: it is imported once there is one.
        from .failures import as_failure

        failure = as_failure(error)
        if failure is None:
            raise
        typer.echo(f"headrace: {failure.message}", err=True)
        sys.exit(failure.status)
