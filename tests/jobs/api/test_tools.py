"""Functions that a chat's model may call: by the official client, and in texts that models write by themselves."""

import json
from collections.abc import Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from headrace.engine.text.tokenizer import Tokenizer
from headrace.jobs.api.errors import ApiError
from headrace.jobs.api.openai.chat_schemas import ChatCompletionRequest
from headrace.jobs.api.openai.tool_calls import (
    CallEvent,
    HermesParser,
    NamedCallParser,
    RequiredCallParser,
    ToolCallParser,
    merged_calls,
    tool_call_parser,
)
from headrace.jobs.batches.lines import CHAT as ENDPOINT
from headrace.jobs.batches.lines import BatchLine
from headrace.jobs.batches.requests import ModelLimits, RequestReader
from headrace.jobs.live.prompt import LivePrompts
from headrace.jobs.streams.events import StreamEvent

from ..running import MODEL

CHAT: list[Any] = [{"role": "user", "content": "I was charged twice this month."}]
KIND = {"type": "object", "properties": {"kind": {"$ref": "#/$defs/Kind"}}, "required": ["kind"]}
PARAMETERS = {**KIND, "additionalProperties": False, "$defs": {"Kind": {"enum": ["billing", "shipping"]}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "route", "description": "To a desk.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "close", "strict": True}},
]
NAMED: Any = {"type": "function", "function": {"name": "route"}}
OPTIONS: dict[str, Any] = {"model": MODEL.name, "messages": CHAT, "temperature": 0, "max_tokens": 100, "tools": TOOLS}


def request(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"model": "m", "messages": CHAT, "tools": TOOLS, **fields})


def parsed(parser: ToolCallParser, pieces: Sequence[str], end: str = "stop") -> tuple[str, list[tuple[str, Any]], str]:
    """The text, the calls' names and arguments, how it ended."""
    given = [StreamEvent(number, text=piece) for number, piece in enumerate(pieces, 1)]
    events: list[CallEvent] = [parser.add(event) for event in [*given, StreamEvent(len(pieces), finish_reason=end)]]
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in merged_calls(events)]
    return "".join(event.text for event in events), calls, str(events[-1].finish_reason)


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


F, G = called("f", a=1), called("g", b="é<")
# What a model writes, the text of it, its calls.
HERMES: dict[str, tuple[str, str, list[tuple[str, Any]]]] = {
    "no call": ("Hello <tool> there. \n", "Hello <tool> there. \n", []),
    "one": (F, "", [("f", {"a": 1})]),
    "two after a text": (f"Let me see.\n\n{F}\n{G}", "Let me see.", [("f", {"a": 1}), ("g", {"b": "é<"})]),
    "text behind": (f"{F} done", " done", [("f", {"a": 1})]),
    "no end": (F.removesuffix("</tool_call>"), "", [("f", {"a": 1})]),
    "no JSON": (" <tool_call>f(1)</tool_call>", " <tool_call>f(1)</tool_call>", []),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    "cut short": ('So: <tool_call>{"name": "f", "argu', 'So: <tool_call>{"name": "f", "argu', []),
    "no number": (F.replace("1", "1e999"), F.replace("1", "1e999"), []),
    "half a character": (F.replace("1", r'"\ud800"'), F.replace("1", r'"\ud800"'), []),
    "begun at the end": ("a <tool_ca", "a <tool_ca", []),
}


@pytest.mark.parametrize("case", HERMES)
def test_hermes_calls_are_found_however_they_come(case: str) -> None:
    written, text, calls = HERMES[case]
    wanted = text, calls, "tool_calls" if calls else "stop"
    assert parsed(HermesParser(), list(written)) == wanted
    for cut in range(len(written) + 1):
        assert parsed(HermesParser(), [written[:cut], written[cut:]]) == wanted


def test_calls_beyond_the_most_stay_text() -> None:
    for pieces in ([F + G], [F, G], list(F + G)):
        assert parsed(HermesParser(1), pieces) == (G, [("f", {"a": 1})], "tool_calls")


def test_text_comes_before_a_call_is_complete() -> None:
    parser = HermesParser()
    assert parser.add(StreamEvent(1, text="Let me see.\n<tool_call>")).text == "Let me see."


def test_a_forced_call_that_is_cut_short_stays_what_it_is() -> None:
    assert parsed(RequiredCallParser(), ['[{"name"', ': "f'], "length") == ('[{"name": "f', [], "length")
    parser = NamedCallParser("f")
    events = [parser.add(StreamEvent(1, text='{"a')), parser.add(StreamEvent(1, finish_reason="length"))]
    assert [call["function"]["arguments"] for call in merged_calls(events)] == ['{"a']
    assert events[-1].finish_reason == "length"


def test_a_named_function_is_called(openai_client: OpenAI) -> None:
    [choice] = openai_client.chat.completions.create(**OPTIONS, tool_choice=NAMED).choices
    assert choice.finish_reason == "stop"
    assert choice.message.content is None
    calls: Any = choice.message.tool_calls
    [call] = calls
    assert (call.type, call.function.name) == ("function", "route")
    assert json.loads(call.function.arguments)["kind"] in ("billing", "shipping")


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_stream_brings_the_same_call(openai_client: OpenAI, choice: Any) -> None:
    options: Any = {**OPTIONS, "tool_choice": choice, "parallel_tool_calls": False}
    [whole] = openai_client.chat.completions.create(**options).choices
    chunks = [chunk.choices[0] for chunk in openai_client.chat.completions.create(**options, stream=True)]
    pieces = [piece for chunk in chunks for piece in chunk.delta.tool_calls or ()]
    calls: Any = whole.message.tool_calls
    [call] = calls
    assert [piece.index for piece in pieces] == [0] * len(pieces)
    assert pieces[0].id is not None
    assert pieces[0].id.startswith("call_")
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
    assert not any(chunk.delta.content for chunk in chunks)
    assert chunks[-1].finish_reason == whole.finish_reason == ("tool_calls" if choice == "required" else "stop")


def test_what_cannot_be_is_refused(openai_client: OpenAI) -> None:
    nobody = {"type": "function", "function": {"name": "nobody"}}
    refusals: dict[str, dict[str, Any]] = {
        "has no <tool_call>": {},
        "none of the tools": {"tool_choice": nobody},
        "tool_choice needs tools": {"tools": [], "tool_choice": "required"},
        "what else gives it a form": {"tool_choice": "required", "response_format": {"type": "json_object"}},
    }
    for words, options in refusals.items():
        with pytest.raises(BadRequestError, match=words):
            openai_client.chat.completions.create(**OPTIONS | options)
    plain = openai_client.chat.completions.create(**OPTIONS | {"tool_choice": "none", "max_tokens": 4})
    assert plain.choices[0].message.tool_calls is None


def test_tools_whose_shared_parts_differ_are_refused() -> None:
    other = {"type": "function", "function": {"name": "o", "parameters": {"$defs": {"Kind": {"type": "string"}}}}}
    with pytest.raises(ValueError, match=r"different \$defs of the name 'Kind'"):
        request(tools=[*TOOLS, other], tool_choice="required")


def test_a_schema_at_fault_is_named() -> None:
    bad = {"type": "function", "function": {"name": "o", "parameters": {"type": "nothing"}}}
    with pytest.raises(ApiError) as caught:
        request(tools=[bad], tool_choice="required").sampling(9, 0)
    assert caught.value.param == "tools"


def test_a_template_is_told_of_tools_and_its_format_is_known(tmp_path: Path) -> None:
    folder = copytree(MODEL, tmp_path / "model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% if tools %}<tool_call>{{ tools | tojson }}{% endif %}{{ messages[0].content }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tools = [tool.for_template() for tool in request().tools or ()]
    assert tools == TOOLS
    prompts = LivePrompts(folder)
    shown = prompts.tokenizer.apply_chat_template(CHAT, tools=tools)
    assert json.loads(shown.removeprefix("<tool_call>").removesuffix(CHAT[0]["content"])) == TOOLS
    assert len(prompts.chat(CHAT, None, tools).token_ids) > len(prompts.chat(CHAT).token_ids)
    new_parser = tool_call_parser(request(parallel_tool_calls=False), Tokenizer.from_pretrained(folder))
    assert new_parser is not None
    assert parsed(new_parser(), [F + G]) == (G, [("f", {"a": 1})], "tool_calls")


def test_a_batch_refuses_tools() -> None:
    line = BatchLine(1, "a", {"model": "m", "messages": CHAT, "tools": TOOLS})
    row = RequestReader(ENDPOINT, ModelLimits(100, 100), "key").row(0, line)
    assert row.error is not None
    assert row.error.startswith("tools: are not supported in batches")
