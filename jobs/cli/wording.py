"""Errors in the words of the command line."""

import shlex

from ...storage.errors import Argument, WordedError

# Where an option has another name than the field that it gives.
_OPTIONS = {
    "response_format": "json_schema",
    "structured_outputs": "regex",
}


def with_options(error: Exception) -> str:
    """An error's words, with the options of here where it names arguments."""
    return error.worded(_option) if isinstance(error, WordedError) else str(error)


def _option(argument: Argument) -> str:
    if argument.name == "mode":
        return f"--{argument.value}"
    name = _OPTIONS.get(argument.name, argument.name)
    if "." in name:
        # A place within what an option gives.
        return name
    option = f"--{name.replace('_', '-')}"
    return option if argument.value is None else f"{option} {shlex.quote(argument.value)}"
