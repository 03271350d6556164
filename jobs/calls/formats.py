"""In which form calls of tools stand in an answer."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple, Self

from ...engine.errors import InvalidRequestError
from ...engine.text import call_tags
from ...engine.text.call_tags import Tags
from ...engine.text.tokenizer import Tokenizer
from .blocks import invoked_calls, listed_calls, python_calls, separated_calls
from .events import ToolCallParser
from .parsers import (
    TAGS,
    NamedCallParser,
    RequiredCallParser,
    TaggedCallsParser,
    harmony_parser,
    json_parser,
    named_json_parser,
)
from .written import Call, NoTexts, function_call, gemma_call, json_call, no_texts, pairs_call

_Tagged = Literal["hermes", "qwen3_coder", "glm45", "gemma4", "seed_oss", "minimax_m2", "deepseek_v3"]
_Listed = Literal["hunyuan", "nemotron", "cohere", "apertus", "olmo3", "lfm2"]
Kind = Literal["named", "required", "json", "mistral", "harmony", _Tagged, _Listed]


class _Between(NamedTuple):
    """How calls stand between tags. `needs_end`: by what stands before the second one cannot know them complete."""

    tags: Tags
    read: Callable[[str, NoTexts], Sequence[Call]]
    needs_end: bool = False


def _one(call: Call | None) -> Sequence[Call]:
    return () if call is None else (call,)


_BETWEEN: Mapping[Kind, _Between] = {
    "hermes": _Between(TAGS, lambda inside, _: _one(json_call(inside))),
    "qwen3_coder": _Between(TAGS, lambda inside, no_texts: _one(function_call(inside, no_texts))),
    "glm45": _Between(TAGS, lambda inside, no_texts: _one(pairs_call(inside, no_texts)), needs_end=True),
    "gemma4": _Between(call_tags.GEMMA, lambda inside, _: _one(gemma_call(inside))),
    "seed_oss": _Between(call_tags.SEED, lambda inside, no_texts: _one(function_call(inside, no_texts))),
    "minimax_m2": _Between(call_tags.MINIMAX, invoked_calls),
    "deepseek_v3": _Between(call_tags.DEEPSEEK, lambda inside, _: separated_calls(inside)),
    "hunyuan": _Between(call_tags.HUNYUAN, lambda inside, _: listed_calls(inside)),
    "nemotron": _Between(call_tags.NEMOTRON, lambda inside, _: listed_calls(inside)),
    "cohere": _Between(call_tags.COHERE, lambda inside, _: listed_calls(inside)),
    "apertus": _Between(call_tags.APERTUS, lambda inside, _: listed_calls(inside)),
    "olmo3": _Between(call_tags.OLMO, lambda inside, _: python_calls(inside)),
    "lfm2": _Between(call_tags.LFM, lambda inside, _: python_calls(inside)),
}
# Of the others either the form tells texts from other values, or no names need to be known.
_NEED_FUNCTIONS = ("qwen3_coder", "glm45", "seed_oss", "minimax_m2", "mistral", "harmony")
# In templates of models that write nothing but JSON: Mistral, Granite, Llama 3. No text has the first two, which are
# special tokens.
_JSON_SIGNS = ("[TOOL_CALLS]", "<|tool_call|>", '"parameters"')
# What other forms have in their templates; those between the same tags come first, as others' are in some of them too.
_TAGGED_SIGNS: Mapping[str, Kind] = {"<function=": "qwen3_coder", "<arg_key>": "glm45"}
_MISTRAL_SIGN = "[ARGS]"
# In LFM2's first templates, which write no calls themselves.
_LFM_SIGN = "<|tool_list_start|>"
# Kimi's.
_UNKNOWN_SIGNS = ("<|tool_calls_section_begin|>",)
SPECIAL_TOKENS_HIDE_CALLS = "calls of tools are found in texts without special tokens: leave it out, or the tools"


@dataclass(frozen=True)
class CallFormat:
    """How calls stand in an answer's text.

    `name`: the function whose arguments it is; `most`: so many are taken. `functions`: where the form does not tell
    texts from other values, those that may be called, each with which of its parameters are no texts.
    """

    kind: Kind
    name: str = ""
    most: int | None = None
    functions: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @classmethod
    def of_model(
        cls, tokenizer: Tokenizer, functions: Mapping[str, Mapping[str, Any]], most: int | None = None
    ) -> Self:
        """That in which a model calls by itself. `functions`: those it is shown, each with the schema of its arguments.

        Raises `InvalidRequestError` where it is none that is known.
        """
        kind = _own_kind(tokenizer)
        named = functions if kind in _NEED_FUNCTIONS else {}
        return cls(kind, most=most, functions={name: no_texts(schema) for name, schema in named.items()})

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @property
    def needs_bare_text(self) -> bool:
        """Whether calls are found only where special tokens, which are around them, are left out of the text."""
        return self.kind in ("json", "mistral", "harmony")

    def parser(self, key: str) -> ToolCallParser:
        """For one answer. The ids of its calls are made of `key`."""
        match self.kind:
            case "named":
                return NamedCallParser(key, self.name)
            case "required":
                return RequiredCallParser(key)
            case "mistral":
                return named_json_parser(key, list(self.functions), self.most)
            case "harmony":
                return harmony_parser(key, list(self.functions))
            case "json":
                return json_parser(key, self.most)
        tags, read, needs_end = _BETWEEN[self.kind]
        return TaggedCallsParser(key, lambda inside: read(inside, self.functions), self.most, tags, needs_end)

    @property
    def tags(self) -> Tags:
        """Between which calls of a form stand that has such."""
        return _BETWEEN[self.kind].tags


def _own_kind(tokenizer: Tokenizer) -> Kind:
    """How a model calls tools by itself, as its chat template shows it."""
    has = tokenizer.tools_template_has
    if tokenizer.thinks_unless_told:
        return "harmony"
    if has("tools") and not any(map(has, _UNKNOWN_SIGNS)):
        for kind, between in _BETWEEN.items():
            if between.tags is not TAGS and has(between.tags.begin):
                return kind
        if has(_LFM_SIGN):
            return "lfm2"
        # As a special token no text has it, and what is between is all that is seen.
        has_tags = has(TAGS.begin) and tokenizer.special_token_id(TAGS.begin) is None
        if (tagged := next(filter(has, _TAGGED_SIGNS), None)) is not None:
            if has_tags:
                return _TAGGED_SIGNS[tagged]
        elif has(_MISTRAL_SIGN):
            return "mistral"
        elif has_tags:
            return "hermes"
        elif has(TAGS.begin) or any(map(has, _JSON_SIGNS)):
            return "json"
    raise InvalidRequestError(
        f"tools: the model's chat template has neither {TAGS.begin} nor another form of calls that is known, so that "
        'they could not be found in its answer: say tool_choice "required", a function or "none"',
        "tools",
    )
