"""`/v1/responses` by the official client: at once, in events, in batches; thinking and calls of tools in them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from headrace.engine.errors import InvalidRequestError
from headrace.jobs.api.errors import ApiError
from headrace.jobs.api.openai.answer_bodies import Answer, Head, Usage
from headrace.jobs.api.openai.request_body import parse_body
from headrace.jobs.api.openai.response_bodies import response
from headrace.jobs.api.openai.response_events import ResponseEvents
from headrace.jobs.api.openai.response_schemas import ResponsesRequest, renamed
from headrace.jobs.calls.events import CallDelta, CallEvent
from headrace.jobs.live.prompt import LivePrompts
from headrace.jobs.spec.sampling import SamplingSpec
from headrace.jobs.streams.events import StreamEvent, ThoughtEvent

from ...api_server import ApiServer
from ...models import write_model_folder
from ...running import MODEL, Result
from ..batch_lines import create, file_lines, wait_for

NAME = MODEL.name
QUESTION = "I was charged twice this month."
PARAMETERS = {
    "type": "object",
    "properties": {"kind": {"enum": ["billing", "shipping"]}},
    "required": ["kind"],
    "additionalProperties": False,
}
ROUTE: Any = {
    "type": "function",
    "name": "route",
    "description": "To a desk.",
    "parameters": PARAMETERS,
    "strict": True,
}
NAMED: Any = {"type": "function", "name": "route"}


class Label(BaseModel):
    label: Literal["billing", "shipping"]


def asked(**fields: Any) -> ResponsesRequest:
    return parse_body(ResponsesRequest, {"model": "m", "input": "a", **fields})


def test_it_says_what_a_chat_says(openai_client: OpenAI) -> None:
    chat: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    said = openai_client.chat.completions.create(model=NAME, messages=chat, temperature=0, max_tokens=2)
    answer = openai_client.responses.create(
        model=NAME,
        instructions="Be brief.",
        input=QUESTION,
        temperature=0,
        max_output_tokens=2,
        metadata={"a": "b"},
        include=["message.output_text.logprobs"],
        top_logprobs=2,
    )
    assert said.usage is not None
    assert answer.usage is not None
    assert answer.output_text == said.choices[0].message.content
    assert answer.id.startswith("resp_")
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (said.usage.prompt_tokens, 2)
    is_cut = said.choices[0].finish_reason == "length"
    assert (answer.status, answer.model) == ("incomplete" if is_cut else "completed", NAME)
    assert (answer.metadata, answer.instructions, answer.temperature) == ({"a": "b"}, "Be brief.", 0)
    [message] = answer.output
    assert message.type == "message"
    part: Any = message.content[0]
    assert "".join(each.token for each in part.logprobs).startswith(part.text)
    assert [len(each.top_logprobs) for each in part.logprobs] == [2] * 2
    cut = openai_client.responses.create(model=NAME, input=QUESTION, max_output_tokens=1)
    assert (cut.status, cut.output[0].status) == ("incomplete", "incomplete")
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    # What was answered can be sent back as it came.
    again: list[Any] = [{"role": "user", "content": QUESTION}, *answer.output, {"role": "user", "content": "And?"}]
    turns: list[Any] = [*chat[1:], said.choices[0].message, {"role": "user", "content": "And?"}]
    expected = openai_client.chat.completions.create(model=NAME, messages=turns, temperature=0, max_tokens=5)
    more = openai_client.responses.create(model=NAME, input=again, temperature=0, max_output_tokens=5)
    assert more.output_text == expected.choices[0].message.content


def test_a_model_is_parsed(openai_client: OpenAI) -> None:
    answer = openai_client.responses.parse(
        model=NAME, input=QUESTION, temperature=0, max_output_tokens=200, text_format=Label
    )
    assert isinstance(answer.output_parsed, Label)
    kind: Any = {"type": "json_schema", "name": "kind", "schema": PARAMETERS}
    held = openai_client.responses.create(model=NAME, input=QUESTION, temperature=0, text={"format": kind})
    assert json.loads(held.output_text)["kind"] in ("billing", "shipping")
    assert held.status == "completed"


@pytest.mark.parametrize("num_logprobs", [None, 1])
@pytest.mark.parametrize("choice", [None, NAMED, "required"])
def test_a_stream_brings_the_same(openai_client: OpenAI, choice: Any, num_logprobs: int | None) -> None:
    options: dict[str, Any] = {"model": NAME, "input": QUESTION, "temperature": 0, "max_output_tokens": 100}
    if num_logprobs is not None:
        options["top_logprobs"] = num_logprobs
    if choice is not None:
        options |= {"tools": [ROUTE], "tool_choice": choice, "parallel_tool_calls": False}
    whole = openai_client.responses.create(**options)
    # The client's own helper puts the events together, and fails where they do not fit.
    with openai_client.responses.stream(**options) as stream:
        events = list(stream)
        last = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:3]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
    ]
    assert events[-1].type == f"response.{whole.status}"
    assert last.output_text == whole.output_text
    assert last.usage is not None
    assert whole.usage is not None
    assert last.usage.output_tokens == whole.usage.output_tokens
    if choice is None:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        assert "".join(deltas) == whole.output_text != ""
        return
    calls: Any = whole.output
    [call] = calls
    assert (call.type, call.name) == ("function_call", "route")
    assert json.loads(call.arguments)["kind"] in ("billing", "shipping")
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == call.arguments
    streamed: Any = last.output
    assert [each.arguments for each in streamed] == [call.arguments]
    # What the call has brought reaches the template, which has no place for it.
    turns = [{"role": "user", "content": QUESTION}, *whole.output]
    turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "done"})
    with pytest.raises(BadRequestError, match="the roles of this model are system, user and assistant, not tool"):
        openai_client.responses.create(model=NAME, input=turns)


@pytest.mark.parametrize("choice", [None, NAMED])
def test_nothing_is_lacking_that_the_official_client_knows(api: ApiServer, choice: Any) -> None:
    """What is, it would read as None where programs expect a number."""
    event_type: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    asked: dict[str, Any] = {"model": NAME, "input": QUESTION, "temperature": 0, "top_logprobs": 1}
    if choice is not None:
        asked |= {"tools": [ROUTE], "tool_choice": choice}
    Response.model_validate(api.post("/v1/responses", **asked))
    streamed = api.http.post("/v1/responses", json={**asked, "stream": True}).raise_for_status().text
    events = [event_type.validate_json(each.partition("data: ")[2]) for each in streamed.split("\n\n")[:-1]]
    assert events[-1].type == "response.completed"


def test_a_batch_has_responses(openai_client: OpenAI, api: ApiServer, headrace: Callable[..., Result]) -> None:
    def line(custom_id: str, **body: Any) -> dict[str, Any]:
        whole = {"model": NAME, "input": QUESTION, "temperature": 0, **body}
        return {"custom_id": custom_id, "method": "POST", "url": "/v1/responses", "body": whole}

    kind = {"type": "json_schema", "name": "kind", "schema": PARAMETERS}
    lines = [
        line("plain", max_output_tokens=4, instructions="Be brief."),
        line("held", text={"format": kind}, metadata={"a": "b"}),
        line("called", tools=[ROUTE], tool_choice=NAMED),
        line("hot", temperature=-1),
        line("long", input="word " * 5000),
        line("before", previous_response_id="resp_1"),
    ]
    done = wait_for(openai_client, create(openai_client, lines, endpoint="/v1/responses"))
    assert (done.status, done.endpoint) == ("completed", "/v1/responses")
    bodies = {name: each["response"]["body"] for name, each in file_lines(openai_client, done.output_file_id).items()}
    live = openai_client.responses.create(
        model=NAME, input=QUESTION, temperature=0, max_output_tokens=4, instructions="Be brief."
    )
    [message] = bodies["plain"]["output"]
    assert message["content"][0]["text"] == live.output_text
    assert bodies["plain"].keys() == json.loads(live.to_json(exclude_unset=True)).keys() - {"_request_id"}
    assert bodies["plain"]["instructions"] == "Be brief."
    assert json.loads(bodies["held"]["output"][0]["content"][0]["text"])["kind"] in ("billing", "shipping")
    assert bodies["held"]["metadata"] == {"a": "b"}
    [call] = bodies["called"]["output"]
    assert (call["type"], call["name"]) == ("function_call", "route")
    errors = file_lines(openai_client, done.error_file_id)
    params = {name: each["response"]["body"]["error"]["param"] for name, each in errors.items()}
    assert params == {"hot": "temperature", "long": "input", "before": "previous_response_id"}
    assert done.usage.output_tokens == sum(body["usage"]["output_tokens"] for body in bodies.values())
    verified = headrace(api.data_dir, "verify", done.id)
    assert verified.status == 0, verified


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation as input"),
        ({"background": True}, "background", "send it in a batch"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]", "web_search is not run here"),
        ({"tool_choice": NAMED}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", '\'required\' or {"type": "function"'),
        ({"tools": [ROUTE], "tool_choice": {"type": "function", "name": "no"}}, "tool_choice", "none of the tools"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "the item itself"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type", "'function_call_output' or"),
        ({"input": [{"role": "user"}]}, "input[0]", "'content'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]", "'image_url'"),
        ({"input": []}, "input", "at least 1"),
        ({"input": 5}, "input", "a text or a list of items, not 5"),
        ({"input": {"role": "user", "content": "a"}}, "input", "a text or a list of items"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format", "lacks a schema"),
        (
            {"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": "no"}}}},
            "text.format",
            "no",
        ),
        ({"reasoning": {"effort": "great"}}, "reasoning.effort", "'minimal'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than or equal to 1"),
        ({"no": 1}, "no", "Unrecognized"),
    ],
)
def test_what_cannot_be_is_named_as_the_request_has_it(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError) as caught, renamed():
        asked(**fields).as_chat().sampling(9, 0, {})
    assert caught.value.param == param
    assert words in str(caught.value.detail)


def test_an_input_that_the_chat_template_refuses(tmp_path: Path) -> None:
    prompts = LivePrompts(write_model_folder(tmp_path / "model", chat=True))
    body = asked(input=[{"type": "function_call_output", "call_id": "1", "output": "5"}]).as_chat()
    with pytest.raises(InvalidRequestError) as refused, renamed():
        prompts.chat([message.for_template() for message in body.messages])
    assert refused.value.field == "input"
    assert str(refused.value) == "the model's chat template refuses the input: no such role"


def test_a_server_refuses_it_too(openai_client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as refused:
        openai_client.responses.create(model=NAME, input="a", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"
    with pytest.raises(BadRequestError, match="context") as refused:
        openai_client.responses.create(model=NAME, input="word " * 5000)
    assert refused.value.code == "context_length_exceeded"


def test_a_response_that_is_asked_for_later_was_not_kept(openai_client: OpenAI) -> None:
    answer = openai_client.responses.create(model=NAME, input=QUESTION, max_output_tokens=1)
    for ask in (openai_client.responses.retrieve, openai_client.responses.delete):
        with pytest.raises(NotFoundError, match=f"{answer.id}' does not exist: nothing is kept here") as refused:
            ask(answer.id)
        assert refused.value.code == "response_not_found"


def test_turns_become_messages() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "id": "fc", "status": "completed"}
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "h"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "m"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        call,
        {**call, "call_id": "2"},
        {"type": "function_call_output", "call_id": "1", "output": "d"},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
        {**call, "call_id": "3"},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "cut"}]},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]},
    ]
    chat = asked(input=turns, reasoning={"effort": "none"}, chat_template_kwargs={"b": 1}).as_chat()
    messages = [message.for_template() for message in chat.messages]
    assert [message["role"] for message in messages] == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert [each["id"] for each in messages[2]["tool_calls"]] == ["1", "2"]
    assert (messages[1]["content"], messages[2]["content"], messages[3]["content"]) == ("a\nb", "c", "d")
    assert messages[5]["content"][0]["type"] == "image_url"
    assert [message.get("reasoning_content") for message in messages] == [None, None, "hm", None, "so", None]
    assert chat.told_template == {"reasoning_effort": "none", "enable_thinking": False, "thinking": False, "b": 1}
    low = asked(input="a", reasoning={"effort": "low"}).as_chat()
    assert low.told_template == {"reasoning_effort": "low", "enable_thinking": True, "thinking": True}
    assert chat.include_reasoning is True


def test_what_is_thought_behind_what_was_said_stands_before_the_call() -> None:
    def thought(**fields: Any) -> dict[str, Any]:
        return {"type": "reasoning", "id": "rs", "summary": [], **fields}

    turns = [
        {"role": "user", "content": "a"},
        thought(content=[{"type": "reasoning_text", "text": "first"}]),
        {"role": "assistant", "content": "Let me look."},
        thought(content=[{"type": "reasoning_text", "text": "second"}]),
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        # As OpenAI tells it of its own models; where there is the whole of it, that counts.
        thought(summary=[{"type": "summary_text", "text": "third"}, {"type": "summary_text", "text": "of two"}]),
        thought(summary=[{"type": "summary_text", "text": "no"}], content=[{"type": "reasoning_text", "text": "."}]),
        {"type": "function_call", "call_id": "2", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "3", "name": "f", "arguments": "{}"},
    ]
    messages = [message.for_template() for message in asked(input=turns).as_chat().messages[1:]]
    assert [message["reasoning_content"] for message in messages] == ["first", "second", "third\nof two."]
    assert [message["content"] for message in messages] == ["Let me look.", "", ""]
    assert [[call["id"] for call in message.get("tool_calls", ())] for message in messages] == [[], ["1"], ["2", "3"]]


def test_log_probabilities_wait_for_the_message_that_they_are_of() -> None:
    """A token may bring no text: half a character, or a piece of what becomes a call."""
    entries: list[Any] = [{"token_id": n, "token": "", "logprob": -float(n), "top": []} for n in range(5)]

    def parts_of(*given: StreamEvent) -> list[Any]:
        events = ResponseEvents(Head("resp_1", "m", "fp", 1), asked().told_again(SamplingSpec()))
        for event in (*given, StreamEvent(5, logprobs=(entries[4],)), StreamEvent(6, finish_reason="stop")):
            list(events.add(0, event))
        output = json.loads(events.usage(Usage()).decode().partition("data: ")[2])["response"]["output"]
        return [[each["logprob"] for part in item.get("content", ()) for each in part["logprobs"]] for item in output]

    half, whole = StreamEvent(1, logprobs=(entries[0],)), StreamEvent(2, text="é", logprobs=(entries[1],))
    head = CallEvent.of(StreamEvent(3, logprobs=(entries[2],)), "", [CallDelta.first("k", 0, "f", "{")])
    rest = CallEvent.of(StreamEvent(4, logprobs=(entries[3],)), "", [CallDelta(0, "}")])
    assert parts_of(half, whole) == [[0, -1, -4]]
    assert parts_of(half, whole, head, rest) == [[0, -1, -2], []]
    assert parts_of(half, head, rest) == [[]]
    assert parts_of() == [[-4]]


@pytest.mark.parametrize("end", ["stop", "length"])
def test_events_are_of_items_one_after_the_other(end: str) -> None:
    head = Head("resp_1", "m", "fp", 1)
    told_again = asked().told_again(SamplingSpec(temperature=0.6, top_p=0.9))
    events = ResponseEvents(head, told_again)
    thought, text = ThoughtEvent(1, reasoning="hm"), CallEvent.of(StreamEvent(2, text="So."), "So.")
    calls = [CallDelta.first("k", index, name, "{") for index, name in enumerate("fg")]
    called = CallEvent.of(StreamEvent(3), "", [calls[0], CallDelta(0, "}"), calls[1], CallDelta(1, "}")])
    given = [*events.begin(0)]
    for event in (thought, text, called, StreamEvent(4, finish_reason=end)):
        given += events.add(0, event)
    usage = Usage(5, 1, 7, 2)
    given.append(events.usage(usage))
    told = [json.loads(each.decode().partition("data: ")[2]) for each in given]
    assert [each["type"] for each in told if each["type"].startswith("response.output_item")] == [
        "response.output_item.added",
        "response.output_item.done",
    ] * 4
    items = [each["item"] for each in told if each["type"] == "response.output_item.done"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
    assert [each["output_index"] for each in told if each["type"] == "response.output_item.added"] == [0, 1, 2, 3]
    # The same as that of a request that was not streamed.
    merged = [{"id": each.id, "type": "function", "function": {"name": each.name, "arguments": "{}"}} for each in calls]
    whole = response(head, told_again, Answer("So.", end, reasoning="hm", tool_calls=merged), usage)
    assert told[-1]["response"] == whole
    assert whole["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    assert (whole["temperature"], whole["top_p"]) == (0.6, 0.9)
    failed = [
        json.loads(each.partition("data: ")[2])
        for each in events.error(ApiError(503, "gone", "x")).decode().split("\n\n")[:-1]
    ]
    assert [each["type"] for each in failed] == ["error", "response.failed"]
    assert failed[1]["response"]["error"] == {"code": "x", "message": "gone"}
