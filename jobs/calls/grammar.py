"""Answers that are JSON of some form or else the model's own calls of tools, as a grammar in Lark."""

import json
import re
from collections.abc import Collection, Iterator

from ...engine.structured.structured_outputs import WHITESPACE, StructuredOutputsParams
from ...engine.text import call_tags
from ...engine.text.tokenizer import Tokenizer
from ..spec.response_format import StructuredOutputs
from ..spec.sampling import SamplingSpec
from .formats import CallFormat
from .parsers import TAGS

# What stands in front of calls that are JSON, and behind them, where the tokenizer has it as a special token.
_MARKS_BEFORE = ("[TOOL_CALLS]", "<|tool_call|>", "<|python_tag|>", TAGS.begin)
_GUIDANCE = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
_OBJECT = {"type": "object", **_GUIDANCE}


def json_or_calls(
    sampling: SamplingSpec, form: CallFormat | None, names: Collection[str], tokenizer: Tokenizer
) -> SamplingSpec:
    """The sampling of answers for which JSON is asked and that may call one of the functions `names` instead.

    Of calls it is the form to which they are held, not what their arguments are. The same sampling where the answer
    is no JSON or has to be a call, and where calls are messages (gpt-oss).
    """
    structure = sampling.structure
    if form is None or structure is None or structure.source.kind != "json_schema":
        return sampling
    rules = list(_Calls(form, names, tokenizer).rules())
    if not rules:
        return sampling
    grammar = "\n".join(["start: answer | calls", f"answer: {_answer(structure)}", f"blank: /{WHITESPACE}/", *rules])
    return sampling.model_copy(
        update={"response_format": None, "structured_outputs": StructuredOutputs(grammar=grammar)}
    )


def _answer(structure: StructuredOutputsParams) -> str:
    source = structure.source
    return _json({**json.loads(source.text), "x-guidance": json.loads(source.options)})


class _Calls:
    """How a model calls functions by itself, in rules of which the first is `calls`."""

    def __init__(self, form: CallFormat, names: Collection[str], tokenizer: Tokenizer) -> None:
        self._form = form
        self._names = tuple(names)
        self._tokenizer = tokenizer

    def rules(self) -> Iterator[str]:
        """None for calls that are not the model's own, or messages."""
        match self._form.kind:
            case "hermes":
                yield from self._tagged(f"blank? {self._call('name', 'arguments')} blank?")
            case "qwen3_coder" | "seed_oss":
                yield from self._lazily(f"blank? {_text('<function=')} name {_text('>')}")
            case "glm45":
                yield from self._lazily("blank? name")
            case "minimax_m2":
                yield from self._lazily(f"""blank? {_text('<invoke name="')} name {_text('">')}""")
            case "deepseek_v3":
                yield from self._separated()
            case "olmo3":
                yield from self._lazily(f"blank? name {_text('(')}")
            case "lfm2":
                yield from self._lazily(f"blank? {_text('[')} name {_text('(')}")
            case "gemma4":
                yield from self._as_gemma()
            case "hunyuan" | "nemotron":
                yield from self._tagged(f"blank? {self._list('name', 'arguments')} blank?")
            case "cohere":
                yield from self._tagged(f"blank? {self._list('tool_name', 'parameters')} blank?")
            case "apertus":
                each = [{**_OBJECT, **_only({name: {"type": "object"}})} for name in self._names]
                yield from self._tagged(f"blank? {self._list_of({'anyOf': each})} blank?")
            case "mistral":
                yield from self._named()
            case "json":
                yield from self._as_json()

    def _tagged(self, inside: str) -> Iterator[str]:
        """Of calls between tags."""
        tags = self._form.tags
        yield f"calls: {self._repeated('call', 'blank?')}"
        yield f"call: {self._mark(tags.begin)} {inside} {self._mark(tags.end)}"

    def _lazily(self, begin: str) -> Iterator[str]:
        """Of calls between tags that are no JSON: what follows `begin` is anything."""
        tags = self._form.tags
        yield f"calls: {self._repeated('call', 'blank?')}"
        yield f"call: {self._mark(tags.begin)} {begin} inside"
        yield self._until("inside", tags.end)
        yield f"name: {self._any_name}"

    def _separated(self) -> Iterator[str]:
        one, between = call_tags.DEEPSEEK_CALL, self._mark(call_tags.DEEPSEEK_SEPARATOR)
        yield from self._tagged(f"blank? {self._repeated('one', 'blank?')} blank?")
        yield f'one: {self._mark(one.begin)} ("function" {between} name | name {between}) rest'
        yield self._until("rest", one.end)
        yield f"name: {self._any_name}"

    def _until(self, rule: str, end: str) -> str:
        """Anything, and what ends it."""
        if self._tokenizer.special_token_id(end) is not None:
            return f"{rule}: /(?s:.*)/ {self._mark(end)}"
        # In Lark a slash ends an expression.
        ending = re.escape(end).replace("/", r"\/")
        return f"{rule}[lazy]: /(?s:.*{ending})/"

    def _as_gemma(self) -> Iterator[str]:
        yield from self._tagged('"call:" name object')
        yield f"name: {self._any_name}"
        yield 'object: "{" (pair ("," pair)*)? "}"'
        yield r'pair: /[^\s{}\[\]:,"<]+/ ":" value'
        yield 'value: string | object | "[" (value ("," value)*)? "]" | %json {"type": ["number", "boolean", "null"]}'
        yield f"string: {self._mark(call_tags.GEMMA_QUOTE)} rest"
        yield self._until("rest", call_tags.GEMMA_QUOTE)

    def _named(self) -> Iterator[str]:
        call_id = f"({self._mark('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)?"
        yield f"calls: {self._repeated('call', 'blank?')}"
        yield f"call: {self._mark('[TOOL_CALLS]')} name {call_id} {self._mark('[ARGS]')}? blank? {_json(_OBJECT)}"
        yield f"name: {self._any_name}"

    def _as_json(self) -> Iterator[str]:
        marks = [self._mark(mark) for mark in _MARKS_BEFORE if self._tokenizer.special_token_id(mark) is not None]
        before = f"({' | '.join(marks)})?" if marks else ""
        after = "" if self._tokenizer.special_token_id(TAGS.end) is None else f"{self._mark(TAGS.end)}?"
        calls = self._repeated("call", '";"? blank?')
        bodies = self._repeated("body", 'blank? "," blank?')
        yield f"calls: {before} list {after} | {calls}"
        yield f'list: "[" blank? {bodies} blank? "]"'
        yield f"call: {before} blank? body blank? {after}"
        yield f"body: {self._call('name', 'arguments')} | {self._call('name', 'parameters')}"

    def _repeated(self, rule: str, between: str) -> str:
        return rule if self._form.most == 1 else f"{rule} ({between} {rule})*"

    @property
    def _any_name(self) -> str:
        return " | ".join(map(_text, self._names))

    def _call(self, name: str, arguments: str) -> str:
        return _json({**_OBJECT, **self._properties(name, arguments)})

    def _list(self, name: str, arguments: str) -> str:
        return self._list_of({**_OBJECT, **self._properties(name, arguments)})

    def _list_of(self, call: object) -> str:
        most = {} if self._form.most is None else {"maxItems": self._form.most}
        return _json({"type": "array", "items": call, "minItems": 1, **most, **_GUIDANCE})

    def _properties(self, name: str, arguments: str) -> dict[str, object]:
        # Cohere counts its calls.
        number = {"tool_call_id": {"type": "string"}} if name == "tool_name" else {}
        return _only({**number, name: {"enum": self._names}, arguments: {"type": "object"}})

    def _mark(self, text: str) -> str:
        token_id = self._tokenizer.special_token_id(text)
        return _text(text) if token_id is None else f"<[{token_id}]>"


def _only(properties: dict[str, object]) -> dict[str, object]:
    return {"properties": properties, "required": list(properties), "additionalProperties": False}


def _json(schema: object) -> str:
    return f"%json {json.dumps(schema)}"


def _text(text: str) -> str:
    # Lark's strings are JSON's.
    return json.dumps(text)
