"""Chat templates, compiled as `transformers` compiles them: what models' authors have written for it works here too."""

import json
from datetime import datetime
from typing import Any

from jinja2 import Environment, Template, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import InvalidRequestError


def compile_template(source: str) -> Template:
    """Raises Jinja's `TemplateSyntaxError`."""
    extensions = [_Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_from_template
    environment.globals["strftime_now"] = _strftime_now
    template = environment.from_string(source)
    # What Jinja keeps is a chain of mappings, which it would copy for each prompt, and slowly.
    template.globals = dict(template.globals)
    return template


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`, which tells training what the model says. It is written as it is."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would escape HTML's characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(form: str) -> str:
    """Today's date, by the host's clock, as SmolLM3's, Granite's and Mistral's templates tell it to the model."""
    return datetime.now().strftime(form)


def _raise_from_template(message: str) -> None:
    raise InvalidRequestError(message)
