"""vLLM's parameters of what may be said, and what is written out of it, as its server takes them."""

from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from headrace import LLM, SamplingParams

from ...running import MODEL
from ..batch_lines import chat_line, create, file_lines, wait_for

NAME = MODEL.name
CHAT: list[Any] = [{"role": "user", "content": "Where is my parcel, please?"}]
OPTIONS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}


def asked_in_all_ways(llm: LLM) -> list[dict[str, Any]]:
    """The free answer's tokens are known: some of them are ruled out, or shown."""
    free = llm.chat(CHAT, SamplingParams(**OPTIONS))[0].outputs[0]
    end = llm.get_tokenizer().eos_token_id
    assert end is not None
    return [
        {"allowed_token_ids": sorted(set(free.token_ids[1:]))},
        {"bad_words": [llm.get_tokenizer().decode(free.token_ids[:1])]},
        {"stop": [free.text[6:9]], "include_stop_str_in_output": True},
        {"stop_token_ids": [free.token_ids[4]], "include_stop_str_in_output": True},
        {"logit_bias": {end: 100.0}, "skip_special_tokens": False, "max_tokens": 2},
    ]


def body_of(asked: dict[str, Any]) -> dict[str, Any]:
    biases = {"logit_bias": {str(token): bias for token, bias in asked.get("logit_bias", {}).items()}}
    return OPTIONS | asked | (biases if "logit_bias" in asked else {})


def test_answers_are_the_engines(openai_client: OpenAI, llm: LLM) -> None:
    """At once and in chunks, to chats and to prompts."""
    texts = set()
    for asked in asked_in_all_ways(llm):
        body = body_of(asked)
        expected = llm.chat(CHAT, SamplingParams(**OPTIONS | asked))[0].outputs[0].text
        answer = openai_client.chat.completions.create(model=NAME, messages=CHAT, extra_body=body)
        assert answer.choices[0].message.content == expected
        streamed: Any = openai_client.chat.completions.create(model=NAME, messages=CHAT, stream=True, extra_body=body)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == expected
        texts.add(expected)
        expected = llm.generate("The parcel", SamplingParams(**OPTIONS | asked))[0].outputs[0].text
        completion = openai_client.completions.create(model=NAME, prompt="The parcel", extra_body=body)
        assert completion.choices[0].text == expected
    assert len(texts) == len(asked_in_all_ways(llm))
    assert "<" in expected


def test_a_batch_asks_the_same(openai_client: OpenAI, llm: LLM) -> None:
    ways = asked_in_all_ways(llm)
    lines = [chat_line(str(number), CHAT[0]["content"], **body_of(asked)) for number, asked in enumerate(ways)]
    bad: dict[str, Any] = {
        "allowed_token_ids": [999_999],
        "bad_words": [" "],
        "include_stop_str_in_output": "yes",
        "skip_special_tokens": 0,
    }
    lines += [chat_line(name, **{name: value}) for name, value in bad.items()]
    done = wait_for(openai_client, create(openai_client, lines))
    answers = file_lines(openai_client, done.output_file_id)
    said = [answers[str(number)]["response"]["body"]["choices"][0]["message"]["content"] for number in range(len(ways))]
    assert said == [llm.chat(CHAT, SamplingParams(**OPTIONS | asked))[0].outputs[0].text for asked in ways]
    errors = file_lines(openai_client, done.error_file_id)
    assert {name: line["response"]["body"]["error"]["param"] for name, line in errors.items()} == {
        name: name for name in bad
    }


@pytest.mark.parametrize(
    ("asked", "param", "message"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids", "must be a list with a token id, at least"),
        ({"allowed_token_ids": [5, 999_999]}, "allowed_token_ids", "token id 999999 is outside the vocabulary"),
        ({"allowed_token_ids": [5], "guided_choice": ["a"]}, "allowed_token_ids", "has no meaning with choices"),
        ({"bad_words": [" "]}, "bad_words", "must be without an empty text"),
        ({"bad_words": ["a"] * 1025}, "bad_words", "must be at most 1024 texts of up to 256 characters"),
        ({"bad_words": ["a"], "structured_outputs": {"regex": "a"}}, "bad_words", "beside structured_outputs"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output", "boolean"),
        ({"skip_special_tokens": "no"}, "skip_special_tokens", "boolean"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    openai_client: OpenAI, asked: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(BadRequestError, match=message) as refused:
        openai_client.chat.completions.create(model=NAME, messages=CHAT, extra_body=asked)
    assert refused.value.param == param
