"""Calls as models write them, and what parsers make of them."""

import json
from collections.abc import Sequence
from typing import Any

from headrace.engine.text.call_tags import DEEPSEEK, DEEPSEEK_CALL
from headrace.jobs.calls.events import CallEvent, ToolCallParser, merged_calls
from headrace.jobs.streams.events import StreamEvent


def parsed(parser: ToolCallParser, pieces: Sequence[str], end: str = "stop") -> tuple[str, list[tuple[str, Any]], str]:
    """The text, the calls' names and arguments, how it ended."""
    given = [StreamEvent(number, text=piece) for number, piece in enumerate(pieces, 1)]
    events: list[CallEvent] = [parser.add(event) for event in [*given, StreamEvent(len(pieces), finish_reason=end)]]
    calls = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in merged_calls(events)]
    return "".join(event.text for event in events), calls, str(events[-1].finish_reason)


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def json_call(name: str, key: str = "arguments", **arguments: Any) -> str:
    return json.dumps({"name": name, key: arguments})


def separated(*calls: str) -> str:
    """As DeepSeek's models write them."""
    return (
        f"{DEEPSEEK.begin}{''.join(f'{DEEPSEEK_CALL.begin}{call}{DEEPSEEK_CALL.end}' for call in calls)}{DEEPSEEK.end}"
    )


F, G = called("f", a=1), called("g", b="é<")
P, Q = json_call("f", a=1), json_call("g", "parameters", b="é<")
