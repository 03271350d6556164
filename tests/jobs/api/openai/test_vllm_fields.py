"""Fields that vLLM's clients send and nothing here answers to: defaults are taken, the rest is refused by name."""

from typing import Any

import pytest

from headrace.engine.text.chat_ending import ChatEnding
from headrace.jobs.api.errors import ApiError
from headrace.jobs.api.openai.batch_schemas import BatchRequest
from headrace.jobs.api.openai.chat_schemas import ChatCompletionRequest
from headrace.jobs.api.openai.completion_schemas import CompletionRequest
from headrace.jobs.api.openai.request_body import Body, parse_body

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
TEXT: dict[str, Any] = {"model": "m", "prompt": "x"}
BATCH: dict[str, Any] = {"input_file_id": "f", "endpoint": "/v1/completions", "completion_window": "24h"}
DEFAULTS: dict[str, Any] = {
    "bad_words": [],
    "include_stop_str_in_output": False,
    "length_penalty": 1.0,
    "priority": 0,
    "prompt_logprobs": None,
    "return_token_ids": False,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": False},
    "use_beam_search": False,
}
OF_CHATS: dict[str, Any] = {
    "add_generation_prompt": True,
    "add_special_tokens": False,
    "chat_template": None,
    "chat_template_kwargs": {},
    "continue_final_message": False,
    "documents": None,
    "echo": False,
    "include_reasoning": True,
}


def test_defaults_ask_for_nothing() -> None:
    assert parse_body(ChatCompletionRequest, CHAT | DEFAULTS | OF_CHATS).includes_usage
    assert parse_body(CompletionRequest, TEXT | DEFAULTS | {"add_special_tokens": True}).includes_usage


@pytest.mark.parametrize(
    ("field", "value", "instead"),
    [
        ("spaces_between_special_tokens", False, "leave it out"),
        ("use_beam_search", True, "leave it out"),
        ("truncate_prompt_tokens", 5, "leave it out"),
        ("guided_json", {"type": "object"}, "say structured_outputs.json"),
        ("guided_regex", "a+", "say structured_outputs.regex"),
        ("guided_grammar", "root", "say structured_outputs.grammar"),
        ("prompt_logprobs", 1, "say echo and logprobs at /v1/completions"),
    ],
)
def test_anything_else_is_refused_by_name(field: str, value: Any, instead: str) -> None:
    refused_by(ChatCompletionRequest, CHAT | {field: value}, field, instead)
    refused_by(CompletionRequest, TEXT | {field: value}, field, instead)


def test_what_only_conversations_have() -> None:
    functions = [{"name": "f"}]
    refused_by(ChatCompletionRequest, CHAT | {"functions": functions}, "functions", "say tools")


@pytest.mark.parametrize(
    ("kind", "body", "param", "words"),
    [
        (ChatCompletionRequest, CHAT | {"x" * 10_000: 1}, f"{'x' * 64}…", "Unrecognized"),
        (
            BatchRequest,
            BATCH | {"metadata": {"y" * 65: "1"}},
            f"metadata.{'y' * 64}…",
            "its name should have at most 64",
        ),
        (BatchRequest, BATCH | {"metadata": {"y": "z" * 513}}, "metadata.y", "Value should have at most 512"),
    ],
    ids=["field", "key", "value"],
)
def test_a_name_of_the_callers_own_is_not_repeated_at_length(
    kind: type[Body], body: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(ApiError) as refused:
        parse_body(kind, body)
    assert refused.value.param == param
    assert words in str(refused.value.detail)
    assert len(str(refused.value.detail)) < 200


@pytest.mark.parametrize(
    ("given", "ending"),
    [
        ({}, ChatEnding.ANSWER),
        ({"add_generation_prompt": False}, ChatEnding.LAST_MESSAGE),
        ({"add_generation_prompt": False, "continue_final_message": True}, ChatEnding.WITHIN_LAST_MESSAGE),
    ],
)
def test_where_a_prompt_may_end(given: Any, ending: ChatEnding) -> None:
    assert parse_body(ChatCompletionRequest, CHAT | given).ending is ending


@pytest.mark.parametrize("given", [{}, {"add_generation_prompt": True}])
def test_an_answer_cannot_be_begun_and_gone_on_with(given: Any) -> None:
    with pytest.raises(ApiError, match="say false for add_generation_prompt") as refused:
        parse_body(ChatCompletionRequest, CHAT | {"continue_final_message": True} | given)
    assert (refused.value.param, refused.value.status_code) == ("continue_final_message", 400)


def test_what_the_template_is_told_of_documents() -> None:
    documents = [{"title": "a", "text": "b"}]
    told = parse_body(ChatCompletionRequest, CHAT | {"documents": documents}).told_template
    assert told == {"documents": documents}
    both = {"documents": documents, "chat_template_kwargs": {"documents": []}}
    assert parse_body(ChatCompletionRequest, CHAT | both).told_template == {"documents": []}
    with pytest.raises(ApiError) as refused:
        parse_body(ChatCompletionRequest, CHAT | {"documents": ["b"]})
    assert refused.value.param == "documents[0]"


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"messages": []}, "'messages', which is set here"),
        ([], "dictionary"),
        ({"x": "\ud800"}, "can only have what JSON has"),
    ],
)
def test_what_a_template_can_not_be_told_is_refused(kwargs: Any, words: str) -> None:
    with pytest.raises(ApiError, match=words) as refused:
        parse_body(ChatCompletionRequest, CHAT | {"chat_template_kwargs": kwargs})
    assert refused.value.param == "chat_template_kwargs"


def refused_by(kind: type[ChatCompletionRequest | CompletionRequest], body: Any, field: str, instead: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_body(kind, body)
    assert (refused.value.param, refused.value.code) == (field, "unsupported_parameter")
    assert instead in str(refused.value.detail)
