"""Responses as OpenAI's clients read them. No HTTP in here: batches write the same bodies into files."""

from collections.abc import Mapping, Sequence
from typing import Any

from .answer_bodies import Answer, Head, Usage
from .logprobs import LogprobEntries, chat_logprobs

RESPONSE = "response"
COMPLETED = "completed"


def response(head: Head, told_again: Mapping[str, Any], answer: Answer, usage: Usage) -> dict[str, Any]:
    """A `Response` that has ended. `told_again`: what it says of its request."""
    return ended(head, told_again, items(head, answer), answer.finish_reason, usage)


def begun(head: Head, told_again: Mapping[str, Any]) -> dict[str, Any]:
    """One that nothing is known of yet."""
    return {
        "id": head.id,
        "object": RESPONSE,
        "created_at": head.created,
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "model": head.model,
        "output": [],
        "usage": None,
        **told_again,
    }


def ended(
    head: Head, told_again: Mapping[str, Any], output: Sequence[Mapping[str, Any]], finish_reason: str, usage: Usage
) -> dict[str, Any]:
    status = last_status(finish_reason)
    return {
        **begun(head, told_again),
        "status": status,
        "incomplete_details": None if status == COMPLETED else {"reason": "max_output_tokens"},
        "output": output,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        },
    }


def items(head: Head, answer: Answer) -> list[dict[str, Any]]:
    """What was thought, what was said, and which tools are to be called."""
    found: list[dict[str, Any]] = []
    if answer.reasoning:
        found.append(reasoning_item(item_id(head, 0), answer.reasoning, COMPLETED))
    if answer.text or not (found or answer.tool_calls):
        part = text_part(answer.text, answer.logprobs)
        found.append(message_item(item_id(head, len(found)), [part], COMPLETED))
    for call in answer.tool_calls:
        function = call["function"]
        told = item_id(head, len(found)), call["id"], function["name"], function["arguments"], COMPLETED
        found.append(call_item(*told))
    found[-1]["status"] = last_status(answer.finish_reason)
    return found


def last_status(finish_reason: str) -> str:
    """That of a response, and of its last item."""
    return "incomplete" if finish_reason == "length" else COMPLETED


def item_id(head: Head, index: int) -> str:
    """Of the item at a place in the output."""
    return f"item_{head.id.removeprefix('resp_')}_{index}"


def reasoning_item(number: str, text: str, status: str) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": number, "type": "reasoning", "summary": [], "content": content, "status": status}


def message_item(number: str, parts: Sequence[Mapping[str, Any]], status: str) -> dict[str, Any]:
    return {"id": number, "type": "message", "role": "assistant", "status": status, "content": list(parts)}


def call_item(number: str, call_id: str, name: str, arguments: str, status: str) -> dict[str, Any]:
    told = {"id": number, "type": "function_call", "status": status}
    return {**told, "call_id": call_id, "name": name, "arguments": arguments}


def text_part(text: str, logprobs: LogprobEntries | None) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": text_logprobs(logprobs)}


def text_logprobs(logprobs: LogprobEntries | None) -> list[Any]:
    entries: list[Any] = chat_logprobs(logprobs)["content"] if logprobs else []
    return entries
