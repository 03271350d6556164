"""Functions that a chat's model may call: by the official client, and in texts that models write by themselves."""

import json
from collections.abc import Sequence
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
from headrace.jobs.calls.events import CallEvent, ToolCallParser, merged_calls
from headrace.jobs.calls.formats import CallFormat, Kind
from headrace.jobs.calls.written import no_texts
from headrace.jobs.live.prompt import LivePrompts
from headrace.jobs.streams.events import StreamEvent

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
    "blanks behind": (f"{F}\n{G} \n", "", [("f", {"a": 1}), ("g", {"b": "é<"})]),
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
    assert parsed(CallFormat("hermes").parser(""), list(written)) == wanted
    for cut in range(len(written) + 1):
        assert parsed(CallFormat("hermes").parser(""), [written[:cut], written[cut:]]) == wanted


def test_calls_beyond_the_most_stay_text() -> None:
    for pieces in ([F + G], [F, G], list(F + G)):
        assert parsed(CallFormat("hermes", most=1).parser(""), pieces) == (G, [("f", {"a": 1})], "tool_calls")


def test_text_comes_before_a_call_is_complete() -> None:
    parser = CallFormat("hermes").parser("")
    assert parser.add(StreamEvent(1, text="Let me see.\n<tool_call>")).text == "Let me see."


def test_a_forced_call_that_is_cut_short_stays_what_it_is() -> None:
    assert parsed(CallFormat("required").parser(""), ['[{"name"', ': "f'], "length") == ('[{"name": "f', [], "length")
    parser = CallFormat("named", "f").parser("")
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
        "what else gives it a form": {"tool_choice": "required", "response_format": {"type": "json_object"}},
    }
    for words, options in refusals.items():
        with pytest.raises(BadRequestError, match=words):
            openai_client.chat.completions.create(**OPTIONS | options)
    for choice in ("sometimes", {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}):
        with pytest.raises(BadRequestError, match="must be 'none', 'auto', 'required' or") as refused:
            openai_client.chat.completions.create(**OPTIONS | {"tool_choice": choice})
        assert refused.value.param == "tool_choice"
    plain = openai_client.chat.completions.create(**OPTIONS | {"tool_choice": "none", "max_tokens": 4})
    assert plain.choices[0].message.tool_calls is None


def test_each_tool_has_its_own_definitions() -> None:
    # That there are no others need not be said.
    other = {**KIND, "$defs": {"Kind": {"const": "other"}}}
    tools = [*TOOLS[:1], {"type": "function", "function": {"name": "other", "parameters": other}}]
    tokenizer = Tokenizer.from_pretrained(MODEL)

    def fits(text: str, is_parallel: bool = True) -> bool:
        form = request(tools=tools, tool_choice="required", parallel_tool_calls=is_parallel).forced_call
        assert form is not None
        grammar = tokenizer.grammar(form.params)
        assert grammar is not None
        matcher = grammar.start.deep_copy()
        token_ids = tokenizer.encode(text, add_special_tokens=False)
        return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())

    billing, own = (
        f'{{"name": "{n}", "parameters": {{"kind": "{k}"}}}}' for n, k in (("route", "billing"), ("other",) * 2)
    )
    assert fits(f"[{billing}]")
    assert fits(f"[{billing}, {own}]")
    assert not fits(f"[{billing}, {own}]", is_parallel=False)
    assert not fits("[" + billing.replace("billing", "other") + "]")
    assert not fits("[" + own.replace('"kind": "other"', '"kind": "billing"') + "]")
    assert not fits("[" + own.replace('"kind": "other"', '"kind": "other", "more": 1') + "]")


def test_a_schema_at_fault_is_named() -> None:
    bad = {"type": "function", "function": {"name": "o", "parameters": {"type": "nothing"}}}
    with pytest.raises(ApiError) as caught:
        request(tools=[bad], tool_choice="required").sampling(9, 0, {})
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
        ('{% if tools %}<|START_ACTION|>{"tool_name": "f", "parameters": {}}{% endif %}', None),
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
        assert calls.functions == ({} if kind in ("hermes", "json") else {"route": [], "close": []})
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


def json_call(name: str, key: str = "arguments", **arguments: Any) -> str:
    return json.dumps({"name": name, key: arguments})


P, Q = json_call("f", a=1), json_call("g", "parameters", b="é<")
JSON: dict[str, tuple[str, str, list[tuple[str, Any]]]] = {
    "text": ("Hello.\n", "Hello.\n", []),
    "one": (f" {P}\n", "", [("f", {"a": 1})]),
    "a list": (f"[{P}, {Q}]", "", [("f", {"a": 1}), ("g", {"b": "é<"})]),
    "semicolons": (f"{P}; {Q}", "", [("f", {"a": 1}), ("g", {"b": "é<"})]),
    "another object": ('{"name": "Ada"}', '{"name": "Ada"}', []),
    "text behind": (f"{P} done", f"{P} done", []),
    "cut short": (P[:-3], P[:-3], []),
    "a bracket": ("[sic] Hello", "[sic] Hello", []),
}


@pytest.mark.parametrize("case", JSON)
def test_calls_in_json_are_found_however_they_come(case: str) -> None:
    written, text, calls = JSON[case]
    wanted = text, calls, "tool_calls" if calls else "stop"
    assert parsed(CallFormat("json").parser(""), list(written)) == wanted
    for cut in range(len(written) + 1):
        assert parsed(CallFormat("json").parser(""), [written[:cut], written[cut:]]) == wanted
    # What is too much stays, as JSON.
    text, calls, _ = parsed(CallFormat("json", most=1).parser(""), [f"{P};{Q}"])
    assert (json.loads(text), calls) == ([json.loads(Q)], [("f", {"a": 1})])


# Which of the functions' parameters are no texts.
FUNCTIONS = {"f": ["a", "on"], "g": []}


def function(name: str, **arguments: str) -> str:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def pairs(name: str, **arguments: str) -> str:
    written = "".join(f"\n<arg_key>{key}</arg_key>\n<arg_value>{each}</arg_value>" for key, each in arguments.items())
    return f"<tool_call>{name}{written}\n</tool_call>"


# Each as its model writes it, the text of it, its calls.
OWN: dict[tuple[Kind, str], tuple[str, str, list[tuple[str, Any]]]] = {}
XML: tuple[tuple[Kind, Any], ...] = (("qwen3_coder", function), ("glm45", pairs))
for kind, write in XML:
    one, two = write("f", a='{"b": [1]}', on="True", c="3"), write("g", text="é\n</x>\n 1")
    both: list[tuple[str, Any]] = [
        ("f", {"a": {"b": [1]}, "on": True, "c": "3"}),
        ("g", {"text": "é\n</x>\n 1"}),
    ]
    OWN |= {
        (kind, "two after a text"): (f"Let me see.\n{one}\n{two}\n", "Let me see.", both),
        (kind, "nothing given"): (write("g"), "", [("g", {})]),
        (kind, "no JSON"): (write("f", a="[1", on="null"), "", [("f", {"a": "[1", "on": None})]),
        (kind, "text behind"): (f"{two} done", " done", both[1:]),
        (kind, "no call"): ("<tool_call>one two</tool_call>", "<tool_call>one two</tool_call>", []),
        (kind, "cut short"): (one[: one.index("</", 60)], one[: one.index("</", 60)], []),
    }
OWN |= {
    ("glm45", "cut between"): (pairs("g", b="1")[:-13], pairs("g", b="1")[:-13], []),
    ("mistral", "one"): ('f{"a": 1}', "", [("f", {"a": 1})]),
    ("mistral", "two"): ('f{"a": 1}g{"b": "}{"}', "", [("f", {"a": 1}), ("g", {"b": "}{"})]),
    ("mistral", "with its marks"): (
        '[TOOL_CALLS]f[CALL_ID]abcdefgh1[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
        "",
        [("f", {"a": 1}), ("g", {})],
    ),
    ("mistral", "numbered"): ('fabcdefgh1{"a": 1}', "", [("f", {"a": 1})]),
    ("mistral", "text"): ("good morning, {all}", "good morning, {all}", []),
    ("mistral", "text behind"): ('f{"a": 1} done', "done", [("f", {"a": 1})]),
    ("mistral", "another name"): ('h{"a": 1}', 'h{"a": 1}', []),
    ("mistral", "cut short"): ('f{"a": ', 'f{"a": ', []),
    # What follows `to` in a message's header, without the special tokens, and the message.
    ("harmony", "behind the channel"): ('=functions.f json{"a": 1}', "", [("f", {"a": 1})]),
    ("harmony", "in front of it"): (' to=functions.gcommentary json{"b": "}{"}', "", [("g", {"b": "}{"})]),
    ("harmony", "without its form"): ("=functions.gcommentary{}", "", [("g", {})]),
    ("harmony", "text"): ("to whom it may concern", "to whom it may concern", []),
    ("harmony", "another name"): ("=functions.h json{}", "=functions.h json{}", []),
    ("harmony", "another tool"): ("=python code1 + 1", "=python code1 + 1", []),
    ("harmony", "cut short"): ('=functions.f json{"a": ', '=functions.f json{"a": ', []),
}


@pytest.mark.parametrize("case", OWN, ids=" ".join)
def test_other_forms_are_found_however_they_come(case: tuple[Kind, str]) -> None:
    written, text, calls = OWN[case]
    wanted = text, calls, "tool_calls" if calls else "stop"
    form = CallFormat(case[0], functions=FUNCTIONS)
    assert parsed(form.parser(""), list(written)) == wanted
    for cut in range(len(written) + 1):
        assert parsed(form.parser(""), [written[:cut], written[cut:]]) == wanted
    most = CallFormat(case[0], most=1, functions=FUNCTIONS)
    for pieces in ([written], list(written)):
        text, one, _ = parsed(most.parser(""), pieces)
        assert one == calls[:1]
        assert bool(text) or len(calls) < 2


def test_text_that_cannot_become_a_call_comes_at_once() -> None:
    parser = CallFormat("mistral", functions=FUNCTIONS).parser("")
    assert [parser.add(StreamEvent(number, text=text)).text for number, text in enumerate("Hey", 1)] == ["H", "e", "y"]


def test_what_a_parameter_may_be_is_read_off_its_schema() -> None:
    schema = {
        "$defs": {"Size": {"enum": [1, 2]}, "Name": {"type": ["string", "null"]}},
        "properties": {
            "number": {"type": "integer"},
            "size": {"$ref": "#/$defs/Size"},
            "name": {"$ref": "#/$defs/Name"},
            "maybe": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            "either": {"anyOf": [{"type": "object"}, {"type": "string"}]},
            "any": {},
            "true": True,
            "none": {"const": None},
            "list": {"type": "array"},
            "lost": {"$ref": "#/$defs/Nothing"},
        },
    }
    assert no_texts(schema) == ["number", "size", "maybe", "none", "list"]
    assert no_texts({}) == []


@pytest.mark.parametrize("end", ["stop", "length"])
def test_required_calls_are_told_as_they_come(end: str) -> None:
    one, two = '{"a": "}]\\\\", "b": [{"c": "\\"{"}]}', "{}"
    written = f'[{{"name": "f", "parameters": {one}}}, {{"name": "g\\"", "parameters": {two}}}]'
    calls = [("f", json.loads(one)), ('g"', {})]
    for pieces in ([written], list(written), *([written[:cut], written[cut:]] for cut in range(len(written)))):
        wanted = "tool_calls" if end == "stop" else end
        assert parsed(CallFormat("required").parser(""), pieces, end) == ("", calls, wanted)
    parser, told = CallFormat("required").parser(""), ""
    for place, character in enumerate(written, 1):
        event = parser.add(StreamEvent(place, text=character))
        told += "".join(delta.arguments for delta in event.calls)
        # What is known of the arguments is told at once.
        if place <= written.index(one) + len(one):
            assert told == one[: max(0, place - written.index(one))]
    cut = CallFormat("required").parser("")
    events = [cut.add(StreamEvent(1, text=written[:40])), cut.add(StreamEvent(2, finish_reason="length"))]
    [call] = merged_calls(events)
    assert one.startswith(call["function"]["arguments"])
    assert events[-1].finish_reason == "length"


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
