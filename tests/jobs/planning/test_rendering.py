"""Rows to prompts: templates, conversations, and what is wrong with them."""

import json
from typing import Any

import pytest

from headrace.engine.text.tokenizer import Tokenizer
from headrace.jobs.errors import RowError, SpecError
from headrace.jobs.planning.rendering import IllustratedPrompt, PromptRenderer
from headrace.jobs.spec.prompt_template import PromptTemplate, asked_columns
from headrace.jobs.spec.schemas import JobSpec

from ..models import write_model_folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Tokenizer:
    return Tokenizer.from_pretrained(write_model_folder(tmp_path_factory.mktemp("models") / "plain"))


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> Tokenizer:
    return Tokenizer.from_pretrained(write_model_folder(tmp_path_factory.mktemp("models") / "chat", chat=True))


def renderer(tokenizer: Tokenizer, *columns: str, **spec: Any) -> PromptRenderer:
    return PromptRenderer(JobSpec.parse(model="m", **spec), tokenizer, columns)


def render(tokenizer: Tokenizer, values: dict[str, Any], **spec: Any) -> str | list[int] | IllustratedPrompt:
    return renderer(tokenizer, *values, **spec).render(values)


def say(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def test_calls_in_a_conversation_are_shown_as_objects(tmp_path):
    folder = write_model_folder(tmp_path / "caller")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}{% if 'tool_calls' in m %}{% for c in m.tool_calls %}"
        "{{ c.function.arguments | tojson }}{% endfor %}{% endif %}"
        "{% if 'tool_call_id' in m %}{{ m.tool_call_id }}{% endif %}{% endfor %}"
    )
    caller = Tokenizer.from_pretrained(folder)
    function = {"name": "f", "arguments": '{"a": "é"}'}
    calls = [{"id": "1", "type": "function", "function": function}, {"function": {**function, "arguments": "no"}}]
    # As a column with a type has them.
    typed = {"tool_calls": None, "tool_call_id": None}
    messages = [
        {**say("user", "a"), **typed},
        {**say("assistant", None), **typed, "tool_calls": calls},
        {**say("tool", "b"), "tool_calls": [], "tool_call_id": "1"},
    ]
    for own in (messages, json.dumps(messages)):
        assert render(caller, {"messages": own}) == 'userassistant{"a": "é"}"no"tool1'


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{text}", "hello"),
        ("{text} and {text}", "hello and hello"),
        ("Label: {text}\n{n}", "Label: hello\n7"),
        ('{{"text": "{text}"}}', '{"text": "hello"}'),
        ("nothing of the row", "nothing of the row"),
        ("{a.b} {a[0]} {two words}", "dotted indexed spaced"),
        ("{a.c} {deep.er.still} {deep.er}", 'field 7 {"still": 7}'),
        ("{list} {umlaut} {yes} {float}", '[1, {"ä": null}] ü true 0.5'),
    ],
)
def test_a_template_is_filled_with_the_columns_as_they_are_named(template, expected):
    values = {
        "text": "hello",
        "n": 7,
        "a": {"b": "not it", "c": "field"},
        "a.b": "dotted",
        "deep": {"er": {"still": 7}},
        "a[0]": "indexed",
        "two words": "spaced",
        "list": [1, {"ä": None}],
        "umlaut": "ü",
        "yes": True,
        "float": 0.5,
    }
    assert PromptTemplate(template).render(values) == expected


THINKING = "{{ messages[0]['content'] }}{% if enable_thinking is defined and not enable_thinking %} d{% endif %}"


@pytest.fixture(scope="module")
def thinking(tmp_path_factory) -> Tokenizer:
    """Qwen3's way: its template is told not to think."""
    folder = write_model_folder(tmp_path_factory.mktemp("models") / "thinking")
    (folder / "chat_template.jinja").write_text(THINKING)
    return Tokenizer.from_pretrained(folder)


@pytest.mark.parametrize("prompt", ["{text}", None])
def test_the_template_is_told_what_the_job_and_the_row_say(thinking, prompt):
    row: dict[str, Any] = {"text": "a", "messages": [say("user", "a")]}
    off, on = {"enable_thinking": False}, {"enable_thinking": True, "unused": None}
    assert render(thinking, row, prompt=prompt) == "a"
    for nothing in ({}, {"chat_template_kwargs": ""}):
        assert render(thinking, row | nothing, prompt=prompt, chat_template_kwargs=off) == "a d"
    for own in (off, json.dumps(off)):
        assert render(thinking, row | {"chat_template_kwargs": own}, prompt=prompt) == "a d"
    assert render(thinking, row | {"chat_template_kwargs": on}, prompt=prompt, chat_template_kwargs=off) == "a"
    for wrong, words in (("{", "is not valid JSON"), ([1], "must be an object"), ({"tools": []}, "'tools'")):
        with pytest.raises(RowError, match=f"column 'chat_template_kwargs' .*({words})"):
            render(thinking, row | {"chat_template_kwargs": wrong}, prompt=prompt)


def test_a_conversation_has_the_rows_tools(tmp_path, thinking):
    folder = write_model_folder(tmp_path / "caller")
    (folder / "chat_template.jinja").write_text("{{ (tools or []) | tojson }}{{ messages[0]['content'] }}")
    caller = Tokenizer.from_pretrained(folder)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    row: dict[str, Any] = {"messages": [say("user", "a")]}
    # Where columns have a type, a row has all the names that any row has.
    typed = [
        {"type": "function", "function": {"name": "f", "strict": None, "parameters": {"type": "object", "x": None}}}
    ]
    for own in (tools, json.dumps(tools), typed):
        assert json.loads(render(caller, row | {"tools": own}).removesuffix("a")) == tools
    # Elsewhere a null means something.
    parameters = {"type": "object", "properties": {"x": {"type": ["string", "null"], "default": None}}}
    nullable = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for given in (row | {"tools": json.dumps(nullable)}, row):
        assert json.loads(render(caller, given, tools=nullable).removesuffix("a")) == nullable
    nothing: tuple[dict[str, Any], ...] = ({}, {"tools": None}, {"tools": ""}, {"tools": []})
    for none in nothing:
        assert render(caller, row | none) == "[]a"
    # A template over the columns has what it names.
    assert render(caller, row | {"text": "b", "tools": "hammer"}, prompt="{text}") == "[]b"
    for wrong, words in (("{", "is not valid JSON"), ("{}", "must hold a list"), (["f"], "must hold a list")):
        with pytest.raises(RowError, match=f"column 'tools' .*{words}"):
            render(caller, row | {"tools": wrong})
    other = [{"type": "function", "function": {"name": "g"}}]
    with_jobs = {"tools": other}
    assert json.loads(render(caller, row, **with_jobs).removesuffix("a")) == other
    assert json.loads(render(caller, row | {"tools": tools}, **with_jobs).removesuffix("a")) == tools
    assert json.loads(render(caller, row | {"tools": ""}, **with_jobs).removesuffix("a")) == other
    assert render(caller, row | {"tools": []}, **with_jobs) == "[]a"
    assert json.loads(render(caller, {"text": "b"}, prompt="{text}", **with_jobs).removesuffix("b")) == other
    with pytest.raises(SpecError, match=r"the chat template of model .* has no tools: leave out tools"):
        render(thinking, row, **with_jobs)
    with pytest.raises(RowError, match="column 'tools': the chat template of the model has no tools"):
        render(thinking, row | {"tools": tools})


def test_a_model_without_a_template_is_told_nothing(plain):
    with pytest.raises(SpecError, match="has no chat template") as refused:
        renderer(plain, "text", prompt="{text}", chat_template_kwargs={"enable_thinking": False})
    assert refused.value.field == "chat_template_kwargs"
    with pytest.raises(SpecError, match=r"^chat_template_kwargs: can not have 'messages', which is set here"):
        renderer(plain, "text", prompt="{text}", chat_template_kwargs={"messages": []})


def test_a_value_that_looks_like_a_template_is_left_alone():
    assert PromptTemplate("{a}{b}").render({"a": "{b} {{", "b": "}"}) == "{b} {{}"


def test_a_templates_columns_are_known_each_once():
    assert PromptTemplate("{b} {a} {{c}} {b}").columns == ("b", "a")


@pytest.mark.parametrize("template", ["{", "}", "{text", "text}", "{a{b}}", "{}", "{text:>10}", "{text!r}", "{text!}"])
def test_a_malformed_template_is_refused_and_named(template):
    with pytest.raises(SpecError) as refusal:
        PromptTemplate(template)
    assert str(refusal.value).startswith("prompt ")
    assert repr(template) in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("template", ['Answer as {"a": 1}. {text}', "{} {text}", "{ {text}", "text}"])
def test_whoever_means_braces_is_told_how_to_write_them(template):
    with pytest.raises(SpecError, match=r"write \{\{.* for .*brace"):
        PromptTemplate(template)


def test_a_template_cannot_reach_into_a_value():
    with pytest.raises(RowError, match=r"'text\.__class__' is missing"):
        PromptTemplate("{text.__class__}").render({"text": "x"})


@pytest.mark.parametrize(
    ("meta", "problem"),
    [({}, "missing"), ("title", "missing"), ([{"title": 1}], "missing"), ({"title": None}, "null"), (None, "null")],
)
def test_a_missing_or_null_field_is_the_rows_fault(meta, problem):
    with pytest.raises(RowError, match=rf"column 'meta\.title' is {problem}"):
        PromptTemplate("{meta.title}").render({"meta": meta})


def test_a_field_of_a_column_that_the_input_lacks_is_refused(plain):
    renderer(plain, "meta", prompt="{meta.title}")
    with pytest.raises(SpecError, match=r"^prompt names the column 'mta\.title'; the input has meta$"):
        renderer(plain, "meta", prompt="{mta.title}")


def test_columns_that_are_asked_for_by_a_field_are_known():
    spec = JobSpec.parse(model="m", prompt="{input_label.text} {other}")
    assert {"input_label", "other"} <= set(asked_columns(spec))


@pytest.mark.parametrize(("values", "problem"), [({}, "missing"), ({"other": 1}, "missing"), ({"text": None}, "null")])
def test_a_missing_or_null_column_is_the_rows_fault(values, problem):
    with pytest.raises(RowError, match=f"column 'text' is {problem}"):
        PromptTemplate("{text}").render(values)


def test_a_column_that_no_row_has_is_refused_with_those_there_are(plain):
    with pytest.raises(SpecError, match="the column 'txet'; the input has no columns"):
        renderer(plain, prompt="{txet}")
    with pytest.raises(SpecError, match="the column 'txet'; the input has text, id"):
        renderer(plain, "text", "id", prompt="{txet}")


def test_without_a_template_a_prompt_column_is_the_prompt(plain):
    assert render(plain, {"prompt": "a b"}) == "a b"


def test_without_anything_to_render_the_message_names_a_template_to_pass(plain):
    with pytest.raises(SpecError, match=r"neither a 'messages' nor a 'prompt' column.*: pass prompt=\"\{text\}\""):
        renderer(plain, "text", "id")


def test_plain_models_get_the_system_text_in_front(plain):
    assert render(plain, {"text": "a"}, prompt="{text}", system="Be brief.") == "Be brief.\n\na"
    assert render(plain, {"text": "a"}, prompt="{text}") == "a"


def test_only_plain_models_want_the_tokenizers_special_tokens(plain, chat):
    assert renderer(plain, "text", prompt="{text}").adds_special_tokens
    assert not renderer(chat, "text", prompt="{text}").adds_special_tokens


def test_chat_models_get_a_conversation(chat):
    assert render(chat, {"text": "a"}, prompt="{text}", system="Be brief.") == "<system>Be brief. <user>a "
    assert render(chat, {"text": "a"}, prompt="{text}") == "<user>a "


@pytest.mark.parametrize("text", ["", " ", "\n\t"])
def test_an_empty_prompt_is_the_rows_fault_whatever_the_system_text(chat, plain, text):
    for tokenizer in (chat, plain):
        with pytest.raises(RowError, match="prompt is empty"):
            render(tokenizer, {"text": text}, prompt="{text}", system="Be brief.")


CONVERSATION = [say("user", "a"), say("assistant", "b"), say("user", "c")]


@pytest.mark.parametrize("messages", [CONVERSATION, json.dumps(CONVERSATION)], ids=["list", "JSON text"])
def test_messages_are_the_conversation(chat, messages):
    assert render(chat, {"messages": messages}) == "<user>a <assistant>b <user>c "
    assert render(chat, {"messages": messages}, system="s") == "<system>s <user>a <assistant>b <user>c "


def test_a_rows_own_system_text_goes_before_the_jobs(chat):
    assert render(chat, {"messages": [say("system", "mine"), say("user", "a")]}, system="s") == "<system>mine <user>a "


def test_a_template_goes_before_messages(chat):
    assert render(chat, {"messages": CONVERSATION, "text": "a"}, prompt="{text}") == "<user>a "


@pytest.mark.parametrize(
    ("messages", "problem"),
    [
        ("{not json", "column 'messages' is not valid JSON"),
        ("{}", "must be a non-empty list"),
        ([], "must be a non-empty list"),
        (None, "must be a non-empty list"),
        (7, "must be a non-empty list"),
        (["hello"], "must hold objects with 'role' and 'content'"),
        ([{"content": "a"}], "must hold objects with 'role' and 'content'"),
        ([{"role": 1, "content": "a"}], "must hold objects with 'role' and 'content'"),
        ([{"role": "user"}], "must hold objects with 'role' and 'content'"),
        ([say("user", 5)], "can have as 'content' a text"),
        ([say("user", [{"type": "image_url", "image_url": {"url": "x"}}])], "reads no images: leave them out"),
        ([say("user", [{"type": "text", "text": None}])], "can have as 'content' a text"),
        ([say("user", [{"type": "text", "text": " "}])], "prompt is empty"),
        ([say("user", "")], "prompt is empty"),
        ([say("user", None)], "prompt is empty"),
        ([say("tool", "a")], "no such role"),
    ],
)
def test_bad_messages_are_the_rows_fault(chat, messages, problem):
    with pytest.raises(RowError, match=problem) as refusal:
        render(chat, {"messages": messages})
    assert "\n" not in str(refusal.value)


def test_parts_of_a_text_are_one(chat):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(chat, {"messages": [say("user", parts)]}) == "<user>a\nb "


def test_a_row_without_messages_is_that_rows_fault(chat):
    with pytest.raises(RowError, match="messages"):
        renderer(chat, "messages", "id").render({"id": 1})


def test_messages_need_a_chat_template(plain):
    with pytest.raises(SpecError, match="no chat template for the column 'messages': pass prompt"):
        renderer(plain, "messages")
