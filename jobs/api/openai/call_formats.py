"""In which form an answer's calls of tools are to be expected."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Literal, Self

from ....engine.errors import InvalidRequestError
from ....engine.text.tokenizer import Tokenizer
from .call_parsers import (
    TAG_BEGIN,
    NamedCallParser,
    RequiredCallParser,
    TaggedCallsParser,
    harmony_parser,
    json_parser,
    named_json_parser,
)
from .chat_schemas import ChatCompletionRequest
from .tool_calls import ToolCallParser
from .tools import NamedTool
from .written_calls import function_call, json_call, no_texts, pairs_call

Kind = Literal["named", "required", "hermes", "json", "qwen3_coder", "glm45", "mistral", "harmony"]

# In templates of models that write nothing but JSON: Mistral, Granite, Llama 3. No text has the first two, which are
# special tokens.
_JSON_SIGNS = ("[TOOL_CALLS]", "<|tool_call|>", '"parameters"')
# What other forms have in their templates; those between tags come first, as others' are in some of them too.
_TAGGED_SIGNS: Mapping[str, Kind] = {"<function=": "qwen3_coder", "<arg_key>": "glm45"}
_MISTRAL_SIGN = "[ARGS]"
# Command's calls are JSON of another shape.
_UNKNOWN_SIGNS = ("<|START_ACTION|>",)


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
    def of(cls, body: ChatCompletionRequest, tokenizer: Tokenizer) -> Self | None:
        """That of answers to `body`; None where no tool may be called.

        Raises `InvalidRequestError` where the model is to decide and its format is none that is known.
        """
        if isinstance(body.calls, NamedTool):
            return cls("named", body.calls.function.name)
        if body.calls == "none":
            return None
        if body.calls == "required":
            return cls("required")
        kind = _own_kind(tokenizer)
        if kind == "harmony" and body.thinking_token_budget is not None:
            raise InvalidRequestError(
                "thinking_token_budget: the final message follows the thinking then, and a call of a tool is another: "
                'leave it out, or say tool_choice "required", a function or "none"',
                "thinking_token_budget",
            )
        functions = [] if kind in ("hermes", "json") else [tool.function for tool in body.tools or ()]
        return cls(
            kind,
            most=1 if body.parallel_tool_calls is False else None,
            functions={function.name: no_texts(function.schema_of_arguments) for function in functions},
        )

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

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
        # As a special token no text has it, and what is between is all that is seen.
        has_tags = has(TAG_BEGIN) and not tokenizer.is_special(TAG_BEGIN)
        if (tagged := next(filter(has, _TAGGED_SIGNS), None)) is not None:
            if has_tags:
                return _TAGGED_SIGNS[tagged]
        elif has(_MISTRAL_SIGN):
            return "mistral"
        elif has_tags:
            return "hermes"
        elif has(TAG_BEGIN) or any(map(has, _JSON_SIGNS)):
            return "json"
    raise InvalidRequestError(
        f"tools: the model's chat template has neither {TAG_BEGIN} nor another form of calls that is known, so that "
        'they could not be found in its answer: say tool_choice "required", a function or "none"',
        "tools",
    )
