"""A prompt as a job describes it: a text with holes for an input's columns."""

import json
from collections.abc import Container, Mapping
from string import Formatter
from typing import Any

from ...storage.errors import Argument
from ..errors import RowError, SpecError
from .schemas import JobSpec

_PROMPT = Argument("prompt")


class PromptTemplate:
    """A text with `{column}` holes, or `{column.field}` where values are objects. `{{` and `}}` are literal braces.

    Names are looked up as they stand, a column's with dots first: no attributes, indices or format specifications,
    which a data set must not be able to reach into. Raises `SpecError` for a malformed template.
    """

    def __init__(self, template: str) -> None:
        try:
            parsed = list(Formatter().parse(template))
        except ValueError as error:
            problem = f" {template!r} is malformed: {error}; write {{{{ for a brace"
            raise SpecError(_PROMPT, problem, field="prompt") from error
        self._pieces: list[tuple[str, str | None]] = []
        for literal, name, specification, conversion in parsed:
            if name == "":
                problem = f" {template!r} has an empty {{}}: name a column, or write {{{{}}}} for two braces"
                raise SpecError(_PROMPT, problem, field="prompt")
            if specification or conversion:
                # Mostly it is JSON, which the model is shown.
                problem = f" {template!r} has a format after {{{name}: leave it out, or write {{{{ and }}}} for braces"
                raise SpecError(_PROMPT, problem, field="prompt")
            self._pieces.append((literal, name))
        self.columns = tuple(dict.fromkeys(name for _, name in self._pieces if name is not None))

    def render(self, values: Mapping[str, Any]) -> str:
        """Raises `RowError` naming the column, or the field of one, that is missing or null."""
        return "".join(literal + (_text(values, name) if name is not None else "") for literal, name in self._pieces)


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values[name] if name in values else _field(values, name)
    if value is None:
        raise RowError(f"column {name!r} is null")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _field(values: Mapping[str, Any], path: str) -> Any:
    value: Any = values
    for name in path.split("."):
        if value is None:
            return None
        if not isinstance(value, Mapping) or name not in value:
            raise RowError(f"column {path!r} is missing")
        value = value[name]
    return value


def is_among(name: str, columns: Container[str]) -> bool:
    """Whether a hole's name is one of these columns, or may be a field of one."""
    return name in columns or name.partition(".")[0] in columns


def asked_columns(spec: JobSpec) -> tuple[str, ...]:
    """Those of the input that the job names, whole or by a field."""
    holes = () if spec.prompt is None else PromptTemplate(spec.prompt).columns
    columns = (*holes, *(hole.partition(".")[0] for hole in holes))
    return columns if spec.image is None else (*columns, spec.image)
