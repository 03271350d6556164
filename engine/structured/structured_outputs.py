"""What an answer has to look like: a JSON schema, a regular expression, a grammar. Free of torch and llguidance."""

import json as json_module
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cached_property
from numbers import Integral
from typing import Any, Literal

from ..errors import InvalidRequestError
from .closed_schema import closed
from .schema_numbers import number_problem, within_range

Kind = Literal["json_schema", "regex", "lark"]

# Beyond this a grammar takes longer to compile than the engine's other requests should wait.
MAX_GRAMMAR_BYTES = 128 * 1024
# What a schema may nest; the compiler's own limit is near.
_MAX_DEPTH = 64
_WAYS = ("json", "json_object", "regex", "choice", "grammar")
_SCHEMA_WITHIN = re.compile(r"%json\s*")
# Bounded: a model may otherwise write nothing but blanks until its tokens are used up.
WHITESPACE = r"\x20|\r?\n[\x20\t]{0,20}"


@dataclass(frozen=True)
class GrammarSource:
    """A grammar before it is compiled: its text, of which kind, and the compiler's options (JSON)."""

    kind: Kind
    text: str
    options: str = "{}"


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Every answer follows a grammar, given in one of five ways; the names are vLLM's.

    `json`: a JSON schema, as text or as an object, or a pydantic model, which stands for its own. `json_object`: any
    JSON object. `regex`: the whole answer matches it, in the syntax of Rust's regex crate, but digits and letters
    (`\\d`, `\\w`) are ASCII's. `choice`: one of these texts, or whole numbers. `grammar`: in
    llguidance's variant of Lark, or in GBNF, whose rules are `root ::= ...`.

    Objects have no properties but those that their schema names, unless it says otherwise (`additionalProperties`).
    Between the parts of JSON a space may stand, or a line break and up to 20 blanks, unless `disable_any_whitespace`.

    Raises `InvalidRequestError`. Whether a grammar can be compiled, `grammar.check_grammar` knows.
    """

    json: str | Mapping[str, Any] | type | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "json", as_schema(self.json))
        object.__setattr__(self, "choice", as_choices(self.choice))
        given = [name for name in _WAYS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise _invalid(f"need exactly one of {', '.join(_WAYS)}, not {' and '.join(given) or 'none'}")
        for field in fields(self):
            _check_type(field.name, getattr(self, field.name))
        if (size := len(self.source.text.encode(errors="surrogatepass"))) > MAX_GRAMMAR_BYTES:
            raise _invalid(f"{given[0]} is {size} bytes, but at most {MAX_GRAMMAR_BYTES} are taken: make it smaller")

    @cached_property
    def source(self) -> GrammarSource:
        """The same in the compiler's terms."""
        if self.regex is not None:
            return GrammarSource("regex", self.regex)
        if self.grammar is not None:
            _check_schemas_within(self.grammar)
            return GrammarSource("lark", self.grammar)
        if self.choice is not None:
            # Lark's strings are JSON's.
            return GrammarSource("lark", "start: " + " | ".join(map(json_module.dumps, self.choice)))
        if self.disable_any_whitespace:
            options: dict[str, Any] = {"whitespace_flexible": False}
        else:
            options = {"whitespace_pattern": WHITESPACE}
        schema = '{"type": "object"}' if self.json is None else _schema_text(self.json)
        return GrammarSource("json_schema", schema, json_module.dumps(options))


def as_schema(given: Any) -> Any:
    """The JSON schema of a pydantic model, which is not imported for it; anything else as it is."""
    return given.model_json_schema() if isinstance(given, type) and hasattr(given, "model_json_schema") else given


def as_choices(given: Any) -> Any:
    """Whole numbers of a list, such as ratings, as they are written; anything else as it is.

    Not true and false, which are written in more than one way, and are what YAML makes of a bare yes and no.
    """
    if not isinstance(given, Sequence) or isinstance(given, str):
        return given
    return tuple(str(each) if isinstance(each, Integral) and not isinstance(each, bool) else each for each in given)


def _check_type(name: str, value: Any) -> None:
    if value is None:
        return
    if name in ("regex", "grammar"):
        _require(isinstance(value, str), f"{name} must be a text, not {value!r}")
    if name in ("json_object", "disable_any_whitespace"):
        _require(isinstance(value, bool), f"{name} must be true or false, not {value!r}")
    if name == "choice":
        fits = isinstance(value, Sequence) and not isinstance(value, str) and bool(value)
        _require(fits and all(isinstance(text, str) and text for text in value), "choice must be a list of texts")


def _schema_text(schema: Any) -> str:
    """A JSON schema as text, known to be a JSON object."""
    try:
        value = json_module.loads(schema) if isinstance(schema, str) else schema
        text = json_module.dumps(within_range(closed(value)), ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise _too_deep() from error
    except (ValueError, TypeError) as error:
        raise _invalid(f"json is no JSON: {error}") from error
    _require(isinstance(value, Mapping), "json must be a schema, that is a JSON object")
    _check_depth(value)
    _check_numbers(value)
    return text


def _check_schemas_within(grammar: str) -> None:
    """Of Lark, which llguidance lets have JSON schemas as terms; what is no JSON it refuses itself."""
    schemas = []
    for place in _SCHEMA_WITHIN.finditer(grammar):
        with suppress(ValueError, RecursionError):
            schemas.append(json_module.JSONDecoder().raw_decode(grammar, place.end())[0])
    _check_numbers(schemas)


def _check_numbers(schema: Any) -> None:
    if (problem := number_problem(schema)) is not None:
        raise _invalid(f"json: {problem}")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(_MAX_DEPTH):
        inner = [each for each in level if isinstance(each, Mapping | list | tuple)]
        level = [part for each in inner for part in (each.values() if isinstance(each, Mapping) else each)]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> InvalidRequestError:
    return _invalid(f"json is nested deeper than {_MAX_DEPTH} levels: name parts of it under $defs")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise _invalid(message)


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"structured_outputs: {message}", "structured_outputs")
