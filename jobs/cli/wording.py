"""Errors in the words of the command line."""

import re
import shlex

from ...storage.errors import Argument, WordedError
from .option_groups import ALL_OPTIONS

# Where an option has another name than the field that it gives.
_OPTIONS = {
    "response_format": "json_schema",
    "structured_outputs": "regex",
}
_SPELLED = {option.removeprefix("--").replace("-", "_"): option for option in ALL_OPTIONS}
# Names that no other word is like, unless somebody's text has them; of a switch without Python's value.
_NAMES = re.compile(r"(?<![\w.\-'\"{`/])([a-z]+(?:_[a-z]+)+)(?![\w.'\"}`/])(=True\b)?")
# Those of one word, where an engine's error begins with them.
_FIRST = re.compile(r"(dtype|quantization|revision)(?= )")


def with_options(error: Exception) -> str:
    """An error's words, with the options of here where it names arguments."""
    if isinstance(error, WordedError):
        return _with_names(error.worded(_option))
    return _with_names(_FIRST.sub(r"--\1", str(error), count=1) if _FIRST.match(str(error)) else str(error))


def _with_names(text: str) -> str:
    """Arguments that the words themselves name, as options; what there is no option for stays."""

    def option(found: re.Match[str]) -> str:
        name = found[1]
        if name == "structured_outputs":
            # Both become it.
            return "--json-schema or --regex"
        return _SPELLED.get(_OPTIONS.get(name, name), found[0])

    return _NAMES.sub(option, text)


def _option(argument: Argument) -> str:
    if argument.name == "mode":
        return f"--{argument.value}"
    name = _OPTIONS.get(argument.name, argument.name)
    if "." in name:
        # A place within what an option gives.
        return name
    option = f"--{name.replace('_', '-')}"
    return option if argument.value is None else f"{option} {shlex.quote(argument.value)}"
