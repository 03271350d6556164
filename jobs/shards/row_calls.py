"""Calls of tools in rows' answers: a column of their own, and a form where they are forced."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa

from ...engine.errors import InvalidRequestError
from ...engine.structured.structured_outputs import StructuredOutputsParams
from ...engine.text.tokenizer import Tokenizer
from ..calls.events import merged_calls
from ..calls.formats import CallFormat
from ..spec.schemas import JobSpec
from ..spec.tool_choice import NamedTool, check_form, forced_form, is_forced
from ..spec.tools import TOOLS, functions_of, row_tools
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
    may_call = spec.tool_choice != "none" and not spec.samples_each_row
    return spec.schema_version >= _SINCE_VERSION and may_call and has_tools and is_one_text


class RowTools:
    """What may be called by the rows of a spooled shard, `table`."""

    def __init__(self, table: pa.Table, spec: JobSpec) -> None:
        has_own = spec.prompt is None and TOOLS in table.column_names
        self._own = table[TOOLS] if has_own else None
        self._jobs = spec.tools or ()

    def of(self, place: int) -> Sequence[Mapping[str, Any]]:
        """The functions of the row at this place of the shard."""
        own = None if self._own is None else row_tools({TOOLS: self._own[place].as_py()})
        return self._jobs if own is None else own


class ForcedCalls:
    """What the answers of a job with a `tool_choice` look like."""

    def __init__(self, tools: RowTools, spec: JobSpec) -> None:
        self._tools = tools
        self._choice = spec.tool_choice
        self._is_parallel = spec.parallel_tool_calls
        # By the functions, as below.
        self._forms: dict[str, StructuredOutputsParams | None] = {}

    def form(self, place: int) -> StructuredOutputsParams | None:
        """That of the row at this place of the shard; None where the model is free.

        Raises `InvalidRequestError` for functions of its own that nothing can be held to.
        """
        if not is_forced(self._choice):
            return None
        tools = self._tools.of(place)
        key = json.dumps(tools, default=str)
        if key not in self._forms:
            functions = functions_of(tools)
            form = forced_form(functions, self._choice, self._is_parallel)
            try:
                check_form(form, functions, self._choice)
            except ValueError as error:
                raise InvalidRequestError(f"{TOOLS}: {error}", TOOLS) from error
            self._forms[key] = None if form is None else form.params
        return self._forms[key]


class RowCalls:
    """Of the rows of a spooled shard, `table`."""

    def __init__(self, table: pa.Table, tools: RowTools, spec: JobSpec, tokenizer: Tokenizer) -> None:
        self._rows = table["row"]
        self._tools = tools
        self._choice = spec.tool_choice
        self._most = None if spec.parallel_tool_calls else 1
        self._tokenizer = tokenizer
        # By the functions: most rows have the same.
        self._formats: dict[str, CallFormat | None] = {}

    def of(self, place: int, text: str | None) -> list[dict[str, Any]] | None:
        """The calls in the answer of the row at this place of the shard, as a message has them; None without any."""
        if not text:
            return None
        if (form := self._format(self._tools.of(place))) is None:
            return None
        # A call's id is the same whenever the row is made again.
        parser = form.parser(str(self._rows[place].as_py()))
        return merged_calls([parser.add(StreamEvent(1, text=text, finish_reason="stop"))]) or None

    def _format(self, tools: Sequence[Mapping[str, Any]]) -> CallFormat | None:
        """None where nothing may be called, or the model's calls are of a form that is not known."""
        if isinstance(self._choice, NamedTool):
            return CallFormat("named", self._choice.function.name)
        if self._choice == "required":
            return CallFormat("required")
        key = json.dumps(tools, default=str)
        if key not in self._formats:
            functions = functions_of(tools)
            try:
                known = CallFormat.of_model(self._tokenizer, functions, self._most) if functions else None
                self._formats[key] = known
            except InvalidRequestError:
                self._formats[key] = None
        return self._formats[key]
