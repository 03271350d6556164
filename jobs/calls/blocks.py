"""Several calls as a model has written them together, read: none where anything else is among them."""

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from ...engine.text.call_tags import DEEPSEEK_CALL, DEEPSEEK_SEPARATOR
from .written import Call, NoTexts, call_of, calls_of, decoded

_INVOKE = re.compile(r'\s*<invoke name="([^"<>\n]+)">(.*?)</invoke>\s*(?=<invoke|$)', re.DOTALL)
_PARAMETER = re.compile(r'\s*<parameter name="([^"<>\n]+)">(.*?)</parameter>\s*(?=<parameter|$)', re.DOTALL)
_SEPARATED = re.compile(
    rf"\s*{DEEPSEEK_CALL.begin}(?:function{DEEPSEEK_SEPARATOR}([^\n<]+)\s*```json\s*(.*?)\s*```"
    rf"|([^\n<]+){DEEPSEEK_SEPARATOR}(.*?)){DEEPSEEK_CALL.end}\s*(?={DEEPSEEK_CALL.begin}|$)",
    re.DOTALL,
)
_OF_JSON = {"true": True, "false": False, "null": None}


def listed_calls(inside: str) -> Sequence[Call]:
    """A list of JSON: Hunyuan's, Nemotron's and Cohere's, and Apertus', whose calls have a name as their only key."""
    values = decoded(inside.strip())
    return calls_of([_named(value) for value in values]) or () if isinstance(values, list) else ()


def _named(value: Any) -> Any:
    if not isinstance(value, dict) or len(value) != 1:
        return value
    [(name, arguments)] = value.items()
    return {"name": name, "arguments": arguments}


def invoked_calls(inside: str, no_texts: NoTexts) -> Sequence[Call]:
    """`<invoke name="NAME"><parameter name="NAME">value</parameter>…</invoke>…`: MiniMax'."""
    found = _all(_INVOKE, inside)
    return _unless_none([call_of(each[1], each[2], _PARAMETER, no_texts) for each in found])


def separated_calls(inside: str) -> Sequence[Call]:
    """JSON behind a name, each between special tokens: DeepSeek's, of which the older have it as a block of code."""
    found = [(each[1] or each[3], each[2] or each[4]) for each in _all(_SEPARATED, inside)]
    return calls_of([{"name": name.strip(), "arguments": decoded(text.strip())} for name, text in found]) or ()


def python_calls(inside: str) -> Sequence[Call]:
    """`NAME(key="text", other=[1, true])`, one a line or in a list: OLMo 3's, LFM's."""
    try:
        lines = [line.value if isinstance(line, ast.Expr) else None for line in ast.parse(inside.strip()).body]
        listed = lines[0].elts if len(lines) == 1 and isinstance(lines[0], ast.List) else lines
        return _unless_none([_python_call(each) for each in listed])
    # Python's parser raises the last two for what is nested deeply.
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return ()


def _python_call(called: ast.expr | None) -> Call | None:
    if not isinstance(called, ast.Call) or not isinstance(called.func, ast.Name | ast.Attribute) or called.args:
        return None
    values = {each.arg: ast.literal_eval(_JsonNames().visit(each.value)) for each in called.keywords}
    arguments = None if None in values else decoded(json.dumps(values))
    return None if arguments is None else {"name": ast.unparse(called.func), "arguments": arguments}


class _JsonNames(ast.NodeTransformer):
    """Takes JSON's words for what Python calls otherwise."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_OF_JSON[node.id]) if node.id in _OF_JSON else node


def _all(pattern: re.Pattern[str], text: str) -> Sequence[re.Match[str]]:
    """What is found in the text one after the other; nothing where that is not all of it."""
    found, place = [], 0
    while place < len(text):
        if (each := pattern.match(text, place)) is None:
            return ()
        found.append(each)
        place = each.end()
    return found


def _unless_none(calls: Sequence[Call | None]) -> Sequence[Call]:
    read = [call for call in calls if call is not None]
    return read if len(read) == len(calls) else ()
