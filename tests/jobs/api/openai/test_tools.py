"""Functions that a chat's model may call: by the official client, and as its chat template shows them."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from pydantic import ValidationError

from headrace.engine.errors import InvalidRequestError
from headrace.engine.text.tokenizer import Tokenizer
from headrace.jobs.api.errors import ApiError
from headrace.jobs.api.openai.chat_schemas import ChatCompletionRequest
from headrace.jobs.api.openai.expected_calls import expected_calls
from headrace.jobs.calls.formats import CallFormat
from headrace.jobs.live.prompt import LivePrompts
from headrace.jobs.spec.response_format import StructuredOutputs

from ...calls.written_calls import F, G, P, Q, parsed
from ...running import MODEL
from ..batch_lines import chat_line, create, file_lines, wait_for

CHAT: list[Any] = [{"role": "user", "content": "I was charged twice this month."}]
KIND = {"type": "object", "properties": {"kind": {"$ref": "#/$defs/Kind"}}, "required": ["kind"]}
PARAMETERS = {**KIND, "additionalProperties": False, "$defs": {"Kind": {"enum": ["billing", "shipping"]}}}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "route", "description": "To a desk.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "close", "strict": True}},
]
NAMED: Any = {"type": "function", "function": {"name": "route"}}
OPTIONS: dict[str, Any] = {"model": MODEL.name, "messages": CHAT, "temperature": 0, "max_tokens": 100, "tools": TOOLS}


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def request(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"model": "m", "messages": CHAT, "tools": TOOLS, **fields})


def test_a_named_function_is_called(openai_client: OpenAI) -> None:
    [choice] = openai_client.chat.completions.create(**OPTIONS, tool_choice=NAMED).choices
    assert choice.finish_reason == "stop"
    assert choice.message.content is None
    calls: Any = choice.message.tool_calls
    [call] = calls
    assert (call.type, call.function.name) == ("function", "route")
    assert json.loads(call.function.arguments)["kind"] in ("billing", "shipping")


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("kind", [{"type": "text"}, {"type": "json_object"}])
def test_a_forced_call_goes_before_the_form_of_an_answer(openai_client: OpenAI, choice: Any, kind: Any) -> None:
    """Which agents send with each request, whether they want a call or the last answer."""
    options: Any = {**OPTIONS, "tool_choice": choice, "parallel_tool_calls": False}
    plain = openai_client.chat.completions.create(**options).choices[0].message
    formed = openai_client.chat.completions.create(**options, response_format=kind).choices[0].message
    expected, calls = ([call.to_dict()["function"] for call in each.tool_calls or ()] for each in (plain, formed))
    assert calls == expected != []


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
    # Mistral's templates take no others back.
    assert (len(pieces[0].id), pieces[0].id.isalnum()) == (9, True)
    assert "".join(piece.function.arguments for piece in pieces) == call.function.arguments
    assert not any(chunk.delta.content for chunk in chunks)
    assert chunks[-1].finish_reason == whole.finish_reason == ("tool_calls" if choice == "required" else "stop")


def test_what_cannot_be_is_refused(openai_client: OpenAI) -> None:
    nobody = {"type": "function", "function": {"name": "nobody"}}
    refusals: dict[str, dict[str, Any]] = {
        "has neither <tool_call>": {},
        "none of the tools": {"tool_choice": nobody},
        "tool_choice needs tools": {"tools": [], "tool_choice": "required"},
        "allows 'nobody', which is none of the tools": {"tool_choice": allowed("required", "close", "nobody")},
        "allows 'close', which is none of the tools": {"tools": [], "tool_choice": allowed("auto", "close")},
        "what else gives it a form": {"tool_choice": "required", "extra_body": {"guided_choice": ["a", "b"]}},
    }
    for words, options in refusals.items():
        with pytest.raises(BadRequestError, match=words):
            openai_client.chat.completions.create(**OPTIONS | options)
    none_allowed = {"mode": "auto", "tools": []}
    for choice in ("sometimes", {"type": "allowed_tools", "allowed_tools": none_allowed}, {"type": "allowed_tools"}):
        with pytest.raises(BadRequestError, match="must be 'none', 'auto', 'required' or") as refused:
            openai_client.chat.completions.create(**OPTIONS | {"tool_choice": choice})
        assert refused.value.param == "tool_choice"
    plain = openai_client.chat.completions.create(**OPTIONS | {"tool_choice": "none", "max_tokens": 4})
    assert plain.choices[0].message.tool_calls is None


def test_of_the_tools_those_that_are_allowed_are_called(openai_client: OpenAI) -> None:
    for name in ("route", "close"):
        options: Any = {**OPTIONS, "parallel_tool_calls": False, "tool_choice": allowed("required", name)}
        [choice] = openai_client.chat.completions.create(**options).choices
        assert [call.to_dict()["function"]["name"] for call in choice.message.tool_calls or ()] == [name]
        assert choice.finish_reason == "tool_calls"
    tools: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "close"}]}
    response = openai_client.responses.create(
        model=MODEL.name, input="Hello", temperature=0, tools=tools, tool_choice=choice, parallel_tool_calls=False
    )
    assert [(item.type, item.name) for item in response.output] == [("function_call", "close")]
    assert response.tool_choice.to_dict() == choice


def test_the_model_is_shown_no_others_than_those_that_are_allowed(tmp_path: Path) -> None:
    folder = copytree(MODEL, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{% for tool in tools %}{{ tool }}{% endfor %}<tool_call>")
    tokenizer = Tokenizer.from_pretrained(folder)
    asked = request(tool_choice=allowed("auto", "close"))
    assert (asked.calls, [tool.function.name for tool in asked.callable_tools]) == ("auto", ["close"])
    assert expected_calls(asked, tokenizer) == CallFormat("hermes")


def follows(form: StructuredOutputs | None, text: str, tokenizer: Tokenizer) -> bool:
    """Whether a text is a whole answer of that form."""
    assert form is not None
    grammar = tokenizer.grammar(form.params)
    assert grammar is not None
    matcher = grammar.start.deep_copy()
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


def test_each_tool_has_its_own_definitions() -> None:
    # That there are no others need not be said.
    other = {**KIND, "$defs": {"Kind": {"const": "other"}}}
    tools = [*TOOLS[:1], {"type": "function", "function": {"name": "other", "parameters": other}}]
    tokenizer = Tokenizer.from_pretrained(MODEL)

    def fits(text: str, is_parallel: bool = True) -> bool:
        form = request(tools=tools, tool_choice="required", parallel_tool_calls=is_parallel).forced_call
        return follows(form, text, tokenizer)

    billing, own = (
        f'{{"name": "{n}", "parameters": {{"kind": "{k}"}}}}' for n, k in (("route", "billing"), ("other",) * 2)
    )
    assert fits(f"[{billing}]")
    assert fits(f"[{billing}, {own}]")
    assert not fits(f"[{billing}, {own}]", is_parallel=False)
    assert not fits("[" + billing.replace("billing", "other") + "]")
    assert not fits("[" + own.replace('"kind": "other"', '"kind": "billing"') + "]")
    assert not fits("[" + own.replace('"kind": "other"', '"kind": "other", "more": 1') + "]")


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": {"a": {"const": 1}}, "required": ["a"]},
        {"type": ["object", "null"], "properties": {"a": {"const": 1}}, "required": ["a"]},
        {"$ref": "#/$defs/A", "$defs": {"A": {"properties": {"a": {"const": 1}}, "required": ["a"]}}},
    ],
)
def test_what_a_forced_call_brings_is_an_object(parameters: dict[str, Any]) -> None:
    """As a caller reads it, and as OpenAI demands its type to say; some leave the type out."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    tokenizer = Tokenizer.from_pretrained(MODEL)
    named = {"type": "function", "function": {"name": "f"}}
    for choice, whole in ("required", '[{"name": "f", "parameters": %s}]'), (named, "%s"):
        form = request(tools=tools, tool_choice=choice).forced_call
        texts = ('{"a":1}', '{"b":1}', "1", "null", '"a"')
        assert [follows(form, whole % text, tokenizer) for text in texts] == [True, False, False, False, False]


def test_a_schema_at_fault_is_named() -> None:
    bad = {"type": "function", "function": {"name": "o", "parameters": {"properties": {"a": {"type": "nothing"}}}}}
    with pytest.raises(ApiError) as caught:
        request(tools=[*TOOLS, bad], tool_choice="required").sampling(9, 0, {})
    assert caught.value.param == "tools"
    assert str(caught.value.detail) == "tools: the parameters of 'o': Invalid type: nothing"


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
    calls = expected_calls(request(parallel_tool_calls=False), Tokenizer.from_pretrained(folder))
    assert calls is not None
    assert CallFormat.from_json(calls.to_json()) == calls
    assert parsed(calls.parser(""), [F + G]) == (G, [("f", {"a": 1})], "tool_calls")


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        ("{% for tool in tools %}{{ tool }}{% endfor %}<tool_call>", "hermes"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "json"),
        ('{% if tools %}{"name": "f", "parameters": {}}{% endif %}', "json"),
        ("{% if tools %}<tool_call><function=f>{% endif %}", "qwen3_coder"),
        ("{% if tools %}<tool_call>f<arg_key>a</arg_key>{% endif %}", "glm45"),
        ("{% if tools %}[TOOL_CALLS]f[ARGS]{}{% endif %}", "mistral"),
        ("{% if tools %}<other:tool_call><function=f>{% endif %}", None),
        ('{% if tools %}<|START_ACTION|>{"tool_name": "f", "parameters": {}}{% endif %}', "cohere"),
        ("{% if tools %}<|tool_call_start|>{% endif %}", "lfm2"),
        ('{% if tools %}<|tool_calls_section_begin|>{"parameters": {}}{% endif %}', None),
        ("{{ messages }}", None),
    ],
)
def test_how_a_model_calls_is_read_off_its_template(tmp_path: Path, template: str, kind: str | None) -> None:
    folder = copytree(MODEL, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.from_pretrained(folder)
    if kind is None:
        with pytest.raises(InvalidRequestError, match="the model's chat template has neither"):
            expected_calls(request(), tokenizer)
    else:
        calls = expected_calls(request(), tokenizer)
        assert calls is not None
        assert calls.kind == kind
        assert calls.functions == ({} if kind in ("hermes", "json", "cohere", "lfm2") else {"route": [], "close": []})
        assert CallFormat.from_json(calls.to_json()) == calls


def test_marks_that_no_text_has_are_not_looked_for(tmp_path: Path) -> None:
    folder = copytree(MODEL, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ tools }}<tool_call>")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    token = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "content": "<tool_call>"}
    tokenizer["added_tokens"].append({**token, "id": 100_000, "special": True})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    calls = expected_calls(request(), Tokenizer.from_pretrained(folder))
    assert calls == CallFormat("json")
    assert parsed(calls.parser(""), [f"{P}\n{Q}"]) == ("", [("f", {"a": 1}), ("g", {"b": "é<"})], "tool_calls")


@pytest.mark.parametrize(("sign", "is_refused"), [("<tool_call>", False), ("[TOOL_CALLS]", True)])
def test_special_tokens_are_not_written_out_where_they_would_hide_calls(
    tmp_path: Path, sign: str, is_refused: bool
) -> None:
    folder = copytree(MODEL, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ tools }}" + sign)
    tokenizer = Tokenizer.from_pretrained(folder)
    if is_refused:
        with pytest.raises(InvalidRequestError, match="skip_special_tokens: calls of tools are found") as refused:
            expected_calls(request(skip_special_tokens=False), tokenizer)
        assert refused.value.field == "skip_special_tokens"
    else:
        assert expected_calls(request(skip_special_tokens=False), tokenizer) == CallFormat("hermes")
    assert expected_calls(request(skip_special_tokens=False, tool_choice="none"), tokenizer) is None


def test_forced_calls_leave_nothing_to_be_ruled_out() -> None:
    for name, value in (("bad_words", ["a"]), ("allowed_token_ids", [1])):
        with pytest.raises(ValidationError, match=f"{name} cannot be held to beside tool_choice"):
            request(**{name: value}, tool_choice="required")


def test_a_batch_calls_too(openai_client: OpenAI) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "max_tokens": 100, "parallel_tool_calls": False}
    lines = [
        chat_line("named", **options, tool_choice=NAMED),
        chat_line("required", **options, tool_choice="required"),
        chat_line("again", **options, tool_choice="required"),
        chat_line("none", tools=TOOLS, tool_choice="none"),
        chat_line("auto", **options),
    ]
    done = wait_for(openai_client, create(openai_client, lines))
    bodies = {name: line["response"]["body"] for name, line in file_lines(openai_client, done.output_file_id).items()}
    assert bodies.keys() == {"named", "required", "again", "none"}
    [named] = bodies["named"]["choices"]
    assert (named["finish_reason"], named["message"]["content"]) == ("stop", None)
    assert [call["function"]["name"] for call in named["message"]["tool_calls"]] == ["route"]
    ids = set()
    for name in ("required", "again"):
        [choice] = bodies[name]["choices"]
        [call] = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls"
        assert isinstance(json.loads(call["function"]["arguments"]), dict)
        ids.add(call["id"])
    assert len(ids) == 2
    assert "tool_calls" not in bodies["none"]["choices"][0]["message"]
    # The model's template shows nothing of how it would call.
    error = file_lines(openai_client, done.error_file_id)["auto"]["response"]
    assert (error["status_code"], error["body"]["error"]["param"]) == (400, "tools")
