"""Chat templates, compiled as `transformers` compiles them: what models' authors have written for it works here too."""

import json
from collections.abc import Collection
from functools import lru_cache
from typing import Any

from jinja2 import Environment, Template, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..errors import InvalidRequestError

# What they name is looked for in a text, not written.
_READING = (nodes.Compare, nodes.Call, nodes.Test)


def compile_template(source: str) -> Template:
    """Raises Jinja's `TemplateSyntaxError`."""
    template = _environment().from_string(source)
    # What Jinja keeps is a chain of mappings, which it would copy for each prompt, and slowly.
    template.globals = dict(template.globals)
    return template


@lru_cache(maxsize=8)
def given_template(source: str) -> Template:
    """As `compile_template`, of one that a caller brings. Raises `InvalidRequestError`."""
    try:
        return compile_template(source)
    except TemplateSyntaxError as error:
        raise InvalidRequestError(f"chat_template is malformed: {error}", "chat_template") from error


def begins_with(source: str, texts: Collection[str]) -> bool:
    """Whether a template may write one of these texts elsewhere than in the turns of a conversation.

    That is before them or, where the answer begins, behind them. What it only writes into earlier turns, or looks for
    in them, it may have of another model. A malformed one, which writes nothing, may as well.
    """
    try:
        tree = _environment().parse(source)
    except TemplateSyntaxError:
        return True
    return _may_write(tree, texts, is_in_turn=False)


def _may_write(node: nodes.Node, texts: Collection[str], is_in_turn: bool) -> bool:
    if isinstance(node, nodes.TemplateData | nodes.Const):
        text = node.data if isinstance(node, nodes.TemplateData) else str(node.value)
        return not is_in_turn and any(each in text for each in texts)
    if isinstance(node, _READING):
        return False
    if isinstance(node, nodes.Filter):
        # What it is told, it looks for too.
        return node.node is not None and _may_write(node.node, texts, is_in_turn)
    if isinstance(node, nodes.For):
        is_in_turn = True
    elif isinstance(node, nodes.If | nodes.CondExpr) and _asks_for_an_answer(node.test):
        # Older templates do that in the last turn.
        is_in_turn = False
    return any(_may_write(child, texts, is_in_turn) for child in node.iter_child_nodes())


def _asks_for_an_answer(test: nodes.Node) -> bool:
    names = [test] if isinstance(test, nodes.Name) else test.find_all(nodes.Name)
    return any(name.name == "add_generation_prompt" for name in names)


def _environment() -> Environment:
    extensions = [_Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_from_template
    return environment


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


def _raise_from_template(message: str) -> None:
    raise InvalidRequestError(message)
