"""Rows whose conversations may call tools: the calls in their answers are a column."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pyarrow as pa
import pytest

from headrace.engine.request import FinishReason
from headrace.engine.text.tokenizer import Tokenizer
from headrace.jobs.client.client import Client
from headrace.jobs.errors import SpecError
from headrace.jobs.hosting.outcomes import Answer
from headrace.jobs.results.json_lines import openai_lines
from headrace.jobs.shards.part_schema import part_schema
from headrace.jobs.shards.row_batch import RowBatch
from headrace.jobs.shards.row_calls import RowTools, has_calls
from headrace.jobs.shards.row_requests import RowRequests
from headrace.jobs.spec.schemas import JobSpec

from ...duck import read_by_duckdb
from ...engine.gemma4_chats import gemma4_copy
from ..attempts import RECEIPT
from ..running import MODEL

CLOSE: dict[str, Any] = {"type": "function", "function": {"name": "close", "parameters": {"type": "object"}}}
ROUTE = {"type": "function", "function": {"name": "route", "description": "To a desk."}}
CHAT = [{"role": "user", "content": "I was charged twice."}]
CALL = '<tool_call>\n{"name": "close", "arguments": {"why": "é"}}\n</tool_call>'
CODER = "<tool_call><function=close><parameter=why>\n1\n</parameter></function></tool_call>"


def model(folder: Path, template: str) -> Path:
    copied = copytree(MODEL, folder)
    (copied / "chat_template.jinja").write_text(template)
    return copied


@pytest.fixture
def hermes(tmp_path: Path) -> Path:
    return model(tmp_path / "hermes", "{{ tools }}<tool_call>{{ messages[0].content }}")


@pytest.mark.parametrize(
    ("columns", "changes", "has"),
    [
        (("messages", "tools"), {}, True),
        (("messages", "tools"), {"sampling": {"structured_outputs": {"regex": "<tool_call>.*"}}}, True),
        (("text",), {"prompt": "{text}", "tools": [CLOSE]}, True),
        (("text",), {"prompt": "{text}", "tools": [CLOSE], "choices": ["a", "b"]}, False),
        (("messages",), {}, False),
        (("prompt", "tools"), {"prompt": "{prompt}"}, False),
        (("messages", "tools"), {"prompt": "{messages}"}, False),
        (("messages", "tools"), {"choices": ["a", "b"]}, False),
        (("messages", "tools"), {"sampling": {"structured_outputs": {"json": {"type": "object"}}}}, False),
        (("messages", "tools"), {"sampling": {"n": 2, "temperature": 1}}, False),
        (("messages", "tools"), {"schema_version": 3}, False),
        (("messages", "tools"), {"endpoint": "/v1/chat/completions"}, False),
    ],
)
def test_which_jobs_have_the_column(columns, changes, has):
    spec = JobSpec.parse(model="m", **changes)
    assert has_calls(spec, columns) is has
    schema = part_schema(spec, [pa.field(name, pa.string()) for name in columns])
    assert ("tool_calls" in schema.names) is has


def answers(folder: Path, rows: list[tuple[str, Any]], **spec: Any) -> list[Any]:
    """The column of rows with these answers and tools."""
    tokenizer = Tokenizer.from_pretrained(folder)
    table = pa.table(
        {
            "row": pa.array([10 + number for number in range(len(rows))]),
            "custom_id": [str(number) for number in range(len(rows))],
            "messages": [CHAT] * len(rows),
            "tools": [tools for _, tools in rows],
            "prompt_token_ids": [[1]] * len(rows),
            "plan_error": pa.array([None] * len(rows), pa.string()),
        }
    )
    batch = RowBatch(table, (), RowRequests(JobSpec.parse(model=str(folder), **spec), tokenizer, "7"), RECEIPT)
    texts = {request.request_id: text for request, (text, _) in zip(batch.requests, rows, strict=True)}
    # The last token ends the answer, and is none of its text.
    tokens = {name: (*tokenizer.encode(text), 0) for name, text in texts.items()}
    batch.record(Answer(name, each, FinishReason.STOP, 0, None, None) for name, each in tokens.items())
    finished = batch.take_finished()
    assert finished["output"].to_pylist() == [text for text, _ in rows]
    return finished["tool_calls"].to_pylist()


def test_the_calls_of_an_answer_are_a_column_beside_its_text(hermes):
    tools = json.dumps([CLOSE])
    [one, two, none, broken] = answers(
        hermes, [(CALL, tools), (f"So:\n{CALL}{CALL}", tools), ("It is done.", tools), ("<tool_call>f(", tools)]
    )
    function = {"name": "close", "arguments": '{"why": "é"}'}
    assert [(call["type"], call["function"]) for call in one] == [("function", function)]
    assert [call["function"] for call in two] == [function] * 2
    assert len({call["id"] for call in (*one, *two)}) == 3
    assert (none, broken) == (None, None)


def test_a_row_without_functions_has_no_calls(hermes):
    named_badly = json.dumps([{"function": {"name": 1}}, {"name": "close"}])
    assert answers(hermes, [(CALL, None), (CALL, "[]"), (CALL, named_badly)]) == [None] * 3


def test_the_types_of_arguments_are_those_of_each_rows_functions(tmp_path):
    coder = model(tmp_path / "coder", "{% if tools %}<tool_call><function=f>{% endif %}")
    integer = {"type": "object", "properties": {"why": {"type": "integer"}}}
    typed = {"type": "function", "function": {"name": "close", "parameters": integer}}
    found = answers(coder, [(CODER, json.dumps([tools])) for tools in (CLOSE, typed)])
    assert [call["function"]["arguments"] for [call] in found] == ['{"why": "1"}', '{"why": 1}']


@pytest.mark.parametrize("own", [None, ""])
def test_a_row_that_says_nothing_of_functions_has_the_jobs(own):
    spec = JobSpec.parse(model=str(MODEL), tools=[CLOSE])
    assert RowTools(pa.table({"tools": pa.array([own], pa.string())}), spec).of(0) == (CLOSE,)


def test_a_rows_own_functions_go_before_the_jobs(tmp_path):
    coder = model(tmp_path / "coder", "{% if tools %}<tool_call><function=f>{% endif %}")
    integer = {"type": "object", "properties": {"why": {"type": "integer"}}}
    typed = {"type": "function", "function": {"name": "close", "parameters": integer}}
    rows = [(CODER, None), (CODER, json.dumps([CLOSE])), (CODER, "[]")]
    jobs, own, none = answers(coder, rows, tools=[typed])
    assert [call["function"]["arguments"] for call in (*jobs, *own)] == ['{"why": 1}', '{"why": "1"}']
    assert none is None
    # With a template over the columns it is a column like any other.
    [call] = answers(coder, [(CODER, "hammer")], tools=[CLOSE], prompt="{custom_id}")[0]
    assert call["function"]["name"] == "close"


def test_special_tokens_of_gemmas_calls_are_in_the_text(tmp_path):
    gemma = gemma4_copy(MODEL, tmp_path / "gemma")
    written = 'So:<|tool_call>call:close{n:[1],why:<|"|>1, "é"<|"|>}<tool_call|>'
    [[call]] = answers(gemma, [(written, json.dumps([CLOSE]))])
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == (
        "close",
        {"n": [1], "why": '1, "é"'},
    )


def test_calls_of_an_unknown_form_stay_text(tmp_path):
    unknown = model(tmp_path / "unknown", '{% if tools %}<|tool_calls_section_begin|>"parameters"{% endif %}')
    assert answers(unknown, [(CALL, json.dumps([CLOSE]))]) == [None]


def test_a_job_over_conversations_with_tools(hermes, tmp_path, unserved: Client):
    """The functions of the rows are of different kinds: where columns have a type, each has the other's fields."""
    rows = [{"messages": CHAT, "tools": [tool], "tool_calls": "none"} for tool in (CLOSE, ROUTE)]
    call = r'<tool_call>\n\{"name": "close", "arguments": \{\}\}\n</tool_call>'
    job = unserved.submit(rows, hermes, tmp_path / "out", structured_outputs={"regex": call}, max_tokens=100)
    job.wait()
    query = f"select tool_calls[1].function.name, input_tool_calls, output from '{tmp_path}/out/*.parquet'"
    text = '<tool_call>\n{"name": "close", "arguments": {}}\n</tool_call>'
    assert read_by_duckdb(query) == [("close", "none", text)] * 2
    for line in openai_lines(job.record, job.results()):
        [choice] = line["response"]["body"]["choices"]
        [made] = choice["message"]["tool_calls"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        assert made["function"] == {"name": "close", "arguments": "{}"}


def integer_of(name: str, parameter: str) -> dict[str, Any]:
    properties = {parameter: {"type": "integer", "minimum": 10, "maximum": 99}}
    parameters = {"type": "object", "properties": properties, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def asked_for(client: Client, folder: Path, rows: list[dict[str, Any]], **options: Any) -> list[dict[str, Any]]:
    job = client.submit(rows, MODEL, folder, max_tokens=100, **options)
    job.wait()
    return job.results().to_pylist()


# The model has no template that shows tools, and never heard of any.
@pytest.mark.parametrize("is_own", [False, True], ids=["tools of the job", "tools of each row"])
def test_an_answer_that_has_to_call_does(tmp_path, client: Client, is_own):
    close, route = integer_of("close", "ticket"), integer_of("route", "desk")
    one: dict[str, Any] = {"messages": CHAT, "tools": [close] if is_own else None}
    other = {"messages": CHAT, "tools": [route] if is_own else None}
    job_tools = {} if is_own else {"tools": [close, route]}
    rows = asked_for(client, tmp_path / "out", [one, other], tool_choice="required", **job_tools)
    allowed = [{"close"}, {"route"}] if is_own else [{"close", "route"}] * 2
    parameter = {"close": "ticket", "route": "desk"}
    for row, names in zip(rows, allowed, strict=True):
        assert row["error"] is None
        calls = row["tool_calls"]
        # A weak model goes on calling until its tokens are used up; the last call may be cut off.
        whole = calls if row["finish_reason"] == "stop" else calls[:-1]
        assert whole
        for call in whole:
            assert call["function"]["name"] in names
            arguments = json.loads(call["function"]["arguments"])
            assert list(arguments) == [parameter[call["function"]["name"]]]
            assert 10 <= arguments[parameter[call["function"]["name"]]] <= 99


def test_one_call_is_all_where_they_are_not_to_be_several(tmp_path, hermes, client: Client):
    tools = [integer_of("close", "ticket"), integer_of("route", "desk")]
    once: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    [row] = asked_for(client, tmp_path / "out", [{"text": "a"}], prompt="{text}", tools=tools, **once)
    assert (row["finish_reason"], len(row["tool_calls"])) == ("stop", 1)
    # Of those that the model has made of itself the first is taken.
    row_of_two = (f"{CALL}{CALL}", json.dumps([CLOSE]))
    assert [len(calls) for calls in answers(hermes, [row_of_two])] == [2]
    assert [len(calls) for calls in answers(hermes, [row_of_two], parallel_tool_calls=False)] == [1]


def test_a_named_function_is_called_once_and_none_never(tmp_path, client: Client):
    tools = [integer_of("close", "ticket"), integer_of("route", "desk")]
    choice = {"type": "function", "function": {"name": "route"}}
    [row] = asked_for(client, tmp_path / "named", [{"text": "a"}], prompt="{text}", tools=tools, tool_choice=choice)
    [call] = row["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("route", row["output"])
    assert 10 <= json.loads(row["output"])["desk"] <= 99
    # Several answers are told as their texts are.
    [row] = asked_for(
        client,
        tmp_path / "several",
        [{"text": "a"}],
        prompt="{text}",
        tools=tools,
        tool_choice=choice,
        n=2,
        temperature=1.0,
    )
    assert "tool_calls" not in row
    assert all(10 <= json.loads(text)["desk"] <= 99 for text in row["outputs"])


def test_rows_whose_functions_cannot_be_called_are_errors_beside_others(tmp_path, client: Client):
    choice = {"type": "function", "function": {"name": "close"}}
    broken = {"type": "function", "function": {"name": "close", "parameters": {"type": "thing"}}}
    tools = ([integer_of("close", "ticket")], None, [integer_of("route", "desk")], [broken])
    rows = [{"messages": CHAT, "tools": json.dumps(own)} for own in tools]
    good, none, other, bad = asked_for(client, tmp_path / "out", rows, tool_choice=choice)
    assert [call["function"]["name"] for call in good["tool_calls"]] == ["close"]
    assert none["error"] == "tool_choice needs tools"
    assert other["error"] == "tool_choice names 'close', which is none of the tools"
    assert bad["error"].startswith("tools: ")
    assert "thing" in bad["error"]
    assert not any(row["tool_calls"] for row in (none, other, bad))


def test_that_nothing_is_to_be_called_leaves_the_column_out(hermes):
    spec = JobSpec.parse(model=str(hermes), tools=[CLOSE], tool_choice="none")
    assert not has_calls(spec, ("messages",))


def test_a_choice_needs_functions_from_somewhere(tmp_path, unserved: Client):
    with pytest.raises(SpecError, match="tool_choice needs tools: the job has none, nor the input a column 'tools'"):
        unserved.submit([{"messages": CHAT}], MODEL, tmp_path / "out", tool_choice="required")
