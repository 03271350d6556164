"""Errors in the words of a request's JSON."""

import json

from ...storage.errors import Argument, WordedError

# Where a request has another place for what Python's argument gives.
_FIELDS = {"sink": "sink.url", "sink_table": "sink.table"}


def with_fields(error: Exception) -> str:
    """An error's words, with the fields of a request where it names arguments."""
    return error.worded(_field) if isinstance(error, WordedError) else str(error)


def _field(argument: Argument) -> str:
    name = _FIELDS.get(argument.name, argument.name)
    return name if argument.value is None else json.dumps({name: argument.value}, ensure_ascii=False)[1:-1]
