"""Errors in the words of a request's JSON."""

import json

from ...storage.errors import Argument, WordedError

# Where a request has another place for what Python's argument gives.
_FIELDS = {
    "sink": "sink.url",
    "sink_table": "sink.table",
    "webhook": "webhook.url",
    "webhook_secret": "webhook.secret",
}


def with_fields(error: Exception) -> str:
    """An error's words, with the fields of a request where it names arguments.

    What `mode` advises no request can do: the output of each has a folder of its own.
    """
    if isinstance(error, WordedError) and any(_is_mode(word) for word in error.args):
        return str(error.args[0])
    return error.worded(_field) if isinstance(error, WordedError) else str(error)


def _is_mode(word: object) -> bool:
    return isinstance(word, Argument) and word.name == "mode"


def _field(argument: Argument) -> str:
    name = _FIELDS.get(argument.name, argument.name)
    return name if argument.value is None else json.dumps({name: argument.value}, ensure_ascii=False)[1:-1]
