"""Calls of tools in rows' answers, as a column of their own."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa

from ...engine.errors import InvalidRequestError
from ...engine.text.tokenizer import Tokenizer
from ..calls.events import merged_calls
from ..calls.formats import CallFormat
from ..spec.schemas import JobSpec
from ..spec.tools import TOOLS, row_tools
from ..streams.events import StreamEvent

# Of the data set.
_SINCE_VERSION = 4


def has_calls(spec: JobSpec, columns: Collection[str]) -> bool:
    """Whether a job's answers may call tools, its own or those of its rows. `columns`: those of its input.

    A choice is none, nor is JSON of the user's own; and of several answers `outputs` has the texts as they are.
    """
    structure = spec.sampling.structure
    has_tools = spec.tools is not None or (spec.prompt is None and {"messages", TOOLS} <= {*columns})
    is_one_text = spec.choices is None and (structure is None or structure.json is None) and spec.sampling.n == 1
    return spec.schema_version >= _SINCE_VERSION and not spec.samples_each_row and has_tools and is_one_text


class RowCalls:
    """Of the rows of a spooled shard, `table`."""

    def __init__(self, table: pa.Table, spec: JobSpec, tokenizer: Tokenizer) -> None:
        has_own = spec.prompt is None and TOOLS in table.column_names
        self._rows = table["row"]
        self._own_tools = table[TOOLS] if has_own else None
        self._tools = spec.tools or ()
        self._tokenizer = tokenizer
        # By the functions: most rows have the same.
        self._formats: dict[str, CallFormat | None] = {}

    def of(self, place: int, text: str | None) -> list[dict[str, Any]] | None:
        """The calls in the answer of the row at this place of the shard, as a message has them; None without any."""
        if not text:
            return None
        if (form := self._format(self._tools_of(place))) is None:
            return None
        # A call's id is the same whenever the row is made again.
        parser = form.parser(str(self._rows[place].as_py()))
        return merged_calls([parser.add(StreamEvent(1, text=text, finish_reason="stop"))]) or None

    def _tools_of(self, place: int) -> Sequence[Mapping[str, Any]]:
        own = None if self._own_tools is None else self._own_tools[place].as_py()
        return self._tools if own is None else row_tools({TOOLS: own})

    def _format(self, tools: Sequence[Mapping[str, Any]]) -> CallFormat | None:
        """None where nothing may be called, or the model's calls are of a form that is not known."""
        key = json.dumps(tools, default=str)
        if key not in self._formats:
            functions = _functions(tools)
            try:
                self._formats[key] = CallFormat.of_model(self._tokenizer, functions) if functions else None
            except InvalidRequestError:
                self._formats[key] = None
        return self._formats[key]


def _functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Each with the schema of its arguments. Templates show also what OpenAI's API would not take."""
    functions = {}
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, Mapping) and isinstance(name := function.get("name"), str) and name:
            parameters = function.get("parameters")
            functions[name] = parameters if isinstance(parameters, Mapping) else {}
    return functions
