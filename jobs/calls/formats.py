"""In which form calls of tools stand in an answer."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal, Self

from ...engine.errors import InvalidRequestError
from ...engine.text.tokenizer import Tokenizer
from .events import ToolCallParser
from .parsers import (
    GEMMA_TAGS,
    TAGS,
    NamedCallParser,
    RequiredCallParser,
    TaggedCallsParser,
    harmony_parser,
    json_parser,
    named_json_parser,
)
from .written import function_call, gemma_call, json_call, no_texts, pairs_call

Kind = Literal["named", "required", "hermes", "json", "qwen3_coder", "glm45", "gemma4", "mistral", "harmony"]

# In templates of models that write nothing but JSON: Mistral, Granite, Llama 3. No text has the first two, which are
# special tokens.
_JSON_SIGNS = ("[TOOL_CALLS]", "<|tool_call|>", '"parameters"')
# What other forms have in their templates; those between tags come first, as others' are in some of them too.
_TAGGED_SIGNS: Mapping[str, Kind] = {"<function=": "qwen3_coder", "<arg_key>": "glm45"}
_MISTRAL_SIGN = "[ARGS]"
# Command's calls are JSON of another shape.
_UNKNOWN_SIGNS = ("<|START_ACTION|>",)
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
        named = {} if kind in ("hermes", "json", "gemma4") else functions
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
            case "hermes":
                return TaggedCallsParser(key, json_call, self.most)
            case "qwen3_coder":
                return TaggedCallsParser(key, partial(function_call, no_texts=self.functions), self.most)
            case "glm45":
                return TaggedCallsParser(key, partial(pairs_call, no_texts=self.functions), self.most, needs_end=True)
            case "gemma4":
                return TaggedCallsParser(key, gemma_call, self.most, GEMMA_TAGS)
            case "mistral":
                return named_json_parser(key, list(self.functions), self.most)
            case "harmony":
                return harmony_parser(key, list(self.functions))
            case "json":
                return json_parser(key, self.most)


def _own_kind(tokenizer: Tokenizer) -> Kind:
    """How a model calls tools by itself, as its chat template shows it."""
    has = tokenizer.tools_template_has
    if tokenizer.thinks_unless_told:
        return "harmony"
    if has("tools") and not any(map(has, _UNKNOWN_SIGNS)):
        if has(GEMMA_TAGS.begin) and tokenizer.special_token_id(GEMMA_TAGS.begin) is not None:
            return "gemma4"
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
