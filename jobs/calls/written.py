"""One call as a model has written it, read: its name and its arguments. None where it is no call."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..spec.json_values import referred

Call = Mapping[str, Any]
# Which parameters of a function are no texts, by the function's name.
NoTexts = Mapping[str, Sequence[str]]

_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^<>\n]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|$)", re.DOTALL)
_NAME = re.compile(r"\s*([a-zA-Z0-9_.-]{1,64})\s*(?=<arg_key>|$)")
_PAIR = re.compile(r"\s*<arg_key>\s*(.*?)\s*</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|$)", re.DOTALL)
_OF_PYTHON = {"True": True, "False": False, "None": None}
_HEAD = re.compile(r"\s*call:([a-zA-Z0-9_.-]{1,64})\s*(?=\{)")
_PIECE = re.compile(
    r"""<\|"\|>(?P<text>.*?)<\|"\|>|'(?P<single>[^']*)'(?=\s*[,}\]])|(?P<json>"(?:[^"\\]|\\.)*")"""
    r"""|(?P<mark>[{}\[\],:=]|\s+)|(?P<bare>[^{}\[\],:="'<][^{}\[\],:="<]*)(?P<names>(?=[:=]))?""",
    re.DOTALL,
)


def json_call(inside: str) -> Call | None:
    """`{"name": …, "arguments": {…}}`: Hermes' and Qwen's."""
    calls = calls_of([decoded(inside)])
    return calls[0] if calls else None


def function_call(inside: str, no_texts: NoTexts) -> Call | None:
    """`<function=NAME><parameter=NAME>value</parameter>…</function>`: Qwen3-Coder's."""
    found = _FUNCTION.fullmatch(inside)
    return None if found is None else call_of(found[1].strip(), found[2], _PARAMETER, no_texts)


def pairs_call(inside: str, no_texts: NoTexts) -> Call | None:
    """`NAME<arg_key>NAME</arg_key><arg_value>value</arg_value>…`: GLM's from 4.5 on."""
    found = _NAME.match(inside)
    return None if found is None else call_of(found[1], inside[found.end() :], _PAIR, no_texts)


def gemma_call(inside: str) -> Call | None:
    """`call:NAME{key:<|"|>text<|"|>,other:[1,true]}`: Gemma 4's.

    Now and then it writes texts as JSON or Python do, or without any marks, and "=" before a value.
    """
    found = _HEAD.match(inside)
    if found is None:
        return None
    pieces, place = [], found.end()
    while place < len(inside):
        if (piece := _PIECE.match(inside, place)) is None:
            return None
        pieces.append(_as_json(piece))
        place = piece.end()
    arguments = decoded("".join(pieces))
    return {"name": found[1], "arguments": arguments} if isinstance(arguments, Mapping) else None


def _as_json(piece: re.Match[str]) -> str:
    text = piece["single"] if piece["text"] is None else piece["text"]
    if text is not None:
        return json.dumps(text)
    if piece["bare"] is None:
        return ":" if piece[0] == "=" else piece[0]
    bare = piece["bare"].strip()
    return json.dumps(_value(bare) if piece["names"] is None else bare)


def call_of(name: str, text: str, argument: re.Pattern[str], no_texts: NoTexts) -> Call | None:
    """With the arguments in the text, each of which the pattern finds; None where anything else is in it."""
    arguments, place = {}, 0
    while text[place:].strip():
        if (found := argument.match(text, place)) is None:
            return None
        is_text = found[1] not in no_texts.get(name, ())
        arguments[found[1]] = found[2] if is_text else _value(found[2])
        place = found.end()
    return {"name": name, "arguments": arguments}


def _value(text: str) -> Any:
    """JSON, or as Python writes it; what is neither stays text."""
    stripped = text.strip()
    if stripped in _OF_PYTHON:
        return _OF_PYTHON[stripped]
    value = decoded(stripped)
    return text if value is None and stripped != "null" else value


def no_texts(schema: Mapping[str, Any]) -> list[str]:
    """The parameters by the schema of a function's arguments that cannot be texts."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return []
    return [name for name, of_one in properties.items() if not _may_be_text(of_one, schema)]


def _may_be_text(schema: Any, root: Mapping[str, Any], depth: int = 0) -> bool:
    if not isinstance(schema, Mapping) or depth > 8:
        return True
    if isinstance(reference := schema.get("$ref"), str):
        return _may_be_text(referred(root, reference), root, depth + 1)
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list):
            return any(_may_be_text(option, root, depth + 1) for option in options)
    if isinstance(values := schema.get("enum"), list):
        return any(isinstance(value, str) for value in values)
    if "const" in schema:
        return isinstance(schema["const"], str)
    types = schema.get("type", "string")
    return "string" in (types if isinstance(types, list) else [types])


def calls_of(values: Any) -> list[Call] | None:
    """Each with `name` and `arguments`; None if one of them is no call."""
    if not isinstance(values, list):
        return None
    calls: list[Call] = []
    for value in values:
        named = value if isinstance(value, Mapping) else {}
        name = named.get("name", named.get("tool_name"))
        arguments = named.get("arguments", named.get("parameters"))
        if not isinstance(name, str) or not isinstance(arguments, Mapping):
            return None
        calls.append({"name": name, "arguments": arguments})
    return calls


def decoded_all(text: str) -> list[Any]:
    """The items of a list, or the values that semicolons part; none where there is anything else."""
    values: list[Any] = []
    while text:
        try:
            _, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            return []
        value = decoded(text[:end])
        values.extend(value if isinstance(value, list) else [value])
        text = text[end:].lstrip("; \t\r\n")
    return values


def decoded(text: str) -> Any:
    """The JSON; None where it is none that can be handed on: infinite numbers cannot, nor halves of characters."""
    try:
        value = json.loads(text)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        return value
    except (ValueError, RecursionError):
        return None
