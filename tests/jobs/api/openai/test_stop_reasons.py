"""What has stopped an answer, as vLLM's server says it beside the `finish_reason`."""

from typing import Any

import pytest
from openai import OpenAI

from headrace import LLM, SamplingParams
from headrace.jobs.batches.output import _answers

from ...running import MODEL
from ..batch_lines import chat_line, create, file_lines, wait_for

NAME = MODEL.name
CHAT: list[Any] = [{"role": "user", "content": "Where is my parcel, please?"}]
FREE: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
Way = tuple[dict[str, Any], str | int | None]


@pytest.fixture(scope="module")
def ways(llm: LLM) -> list[Way]:
    """How an answer may be asked for, and what stops it then."""
    free = llm.chat(CHAT, SamplingParams(**FREE))[0].outputs[0]
    text, token = free.text[6:9], free.token_ids[4]
    end = llm.get_tokenizer().eos_token_id
    asked: list[Way] = [
        (FREE | {"stop": ["never", text]}, text),
        (FREE | {"stop_token_ids": [token]}, token),
        (FREE | {"max_tokens": 2}, None),
        ({"temperature": 0.0, "logit_bias": {end: 100.0}}, None),
        (FREE | {"logit_bias": {end: 100.0}, "stop_token_ids": [end]}, end),
    ]
    for params, reason in asked:
        assert llm.chat(CHAT, SamplingParams(**params))[0].outputs[0].stop_reason == reason
    choices = {"temperature": 0.0, "guided_choice": ["product", "refund"]}
    return [(body_of(params), reason) for params, reason in asked] + [(choices, None)]


def body_of(params: dict[str, Any]) -> dict[str, Any]:
    biases = {str(token): bias for token, bias in params.get("logit_bias", {}).items()}
    return params | {"logit_bias": biases}


def test_a_choice_has_it_beside_its_finish_reason(openai_client: OpenAI, ways: list[Way]) -> None:
    for body, reason in ways:
        answer = openai_client.chat.completions.create(model=NAME, messages=CHAT, extra_body=body)
        assert answer.choices[0].to_dict()["stop_reason"] == reason
        *others, last = openai_client.chat.completions.create(model=NAME, messages=CHAT, stream=True, extra_body=body)
        assert last.choices[0].to_dict()["stop_reason"] == reason
        assert last.choices[0].finish_reason == answer.choices[0].finish_reason
        assert not any("stop_reason" in chunk.choices[0].to_dict() for chunk in others)


def test_a_completion_has_it_too(openai_client: OpenAI, llm: LLM) -> None:
    text = llm.generate("The parcel", SamplingParams(**FREE))[0].outputs[0].text
    for body, reason in ((FREE | {"stop": text[4:7]}, text[4:7]), (FREE, None)):
        answer = openai_client.completions.create(model=NAME, prompt=["The parcel"] * 2, extra_body=body)
        assert [choice.to_dict()["stop_reason"] for choice in answer.choices] == [reason] * 2
        chunks: Any = openai_client.completions.create(model=NAME, prompt="The parcel", stream=True, extra_body=body)
        assert [chunk.choices[0].to_dict().get("stop_reason", "goes on") for chunk in chunks][-1] == reason
    echoed = openai_client.completions.create(model=NAME, prompt="The parcel", echo=True, max_tokens=0)
    assert echoed.choices[0].to_dict()["stop_reason"] is None


def test_a_batchs_answers_have_it(openai_client: OpenAI, llm: LLM, ways: list[Way]) -> None:
    lines = [chat_line(str(number), CHAT[0]["content"], **body) for number, (body, _) in enumerate(ways)]
    params = {**FREE, "temperature": 2.0, "seed": 5, "n": 4, "max_tokens": 20}
    samples = llm.chat(CHAT, SamplingParams(**params))[0].outputs
    stop = samples[1].text[3:5]
    expected = [each.stop_reason for each in llm.chat(CHAT, SamplingParams(**params, stop=stop))[0].outputs]
    assert expected[1] == stop
    lines.append(chat_line("several", CHAT[0]["content"], **params, stop=stop))
    done = wait_for(openai_client, create(openai_client, lines))
    answers = file_lines(openai_client, done.output_file_id)
    told = {
        custom_id: [choice["stop_reason"] for choice in line["response"]["body"]["choices"]]
        for custom_id, line in answers.items()
    }
    assert told == {str(number): [reason] for number, (_, reason) in enumerate(ways)} | {"several": expected}


def test_parts_of_an_earlier_version_have_none() -> None:
    one = {"outputs": None, "output": "a", "finish_reason": "stop", "logprobs": None}
    assert [answer.stop_reason for answer in _answers(one)] == [None]
    several = {"outputs": ["a", "b"], "finish_reasons": ["stop", "length"], "outputs_logprobs": None}
    assert [answer.stop_reason for answer in _answers(several)] == [None, None]
    assert [answer.stop_reason for answer in _answers({**several, "stop_reasons": [None, "7"]})] == [None, 7]
    assert [answer.reasoning for answer in _answers({**several, "reasoning": "hm"})] == ["hm", None]
