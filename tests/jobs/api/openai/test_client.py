"""The official `openai` client against a server and a worker, as its users have it: nothing else talks to them here."""

import asyncio
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import pytest
from openai import (
    APIStatusError,
    AsyncOpenAI,
    AuthenticationError,
    BadRequestError,
    InternalServerError,
    NotFoundError,
    OpenAI,
)
from openai.types.chat import ChatCompletionChunk
from pydantic import BaseModel

from headrace import LLM, SamplingParams
from headrace.jobs.client.client import Client
from headrace.jobs.settings import Settings

from ...api_server import ApiServer
from ...running import LABELS, MODEL, ROOT, environment
from ..in_process import in_process_server

NAME = MODEL.name
SYSTEM = (ROOT / "examples/tickets/system.txt").read_text().strip()
CHAT: list[Any] = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "I was charged twice this month."},
]
PROMPTS = ["The parcel", "My card was charged"]


def test_models(openai_client: OpenAI) -> None:
    models = openai_client.models.list().data
    assert [model.id for model in models] == [NAME]
    assert openai_client.models.retrieve(NAME) == models[0]
    assert models[0].object == "model"
    with pytest.raises(NotFoundError) as refused:
        openai_client.models.retrieve("org/none")
    assert refused.value.code == "model_not_found"


def test_a_chat_is_answered_as_by_the_engine(openai_client: OpenAI, llm: LLM) -> None:
    answer = openai_client.chat.completions.create(model=NAME, messages=CHAT, temperature=0)
    expected = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=None))[0]
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.object, answer.model) == ("chat.completion", NAME)
    assert answer.id == f"chatcmpl-{answer._request_id.removeprefix('req_')}"
    assert answer.system_fingerprint.startswith("fp_")
    assert answer.choices[0].logprobs is None
    usage, num_prompt, num_answer = answer.usage, len(expected.prompt_token_ids), len(expected.outputs[0].token_ids)
    assert (usage.prompt_tokens, usage.completion_tokens) == (num_prompt, num_answer)
    assert usage.total_tokens == num_prompt + num_answer
    assert usage.completion_tokens_details.reasoning_tokens == 0
    again = openai_client.chat.completions.create(model=NAME, messages=CHAT, temperature=0)
    assert 0 < (again.usage.prompt_tokens_details.cached_tokens or 0) < num_prompt
    assert again.id != answer.id


def test_a_streamed_chat_is_the_same_answer(openai_client: OpenAI, wait_until: Callable[..., None]) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "extra_body": {"ignore_eos": True}}
    whole = openai_client.chat.completions.create(model=NAME, messages=CHAT, **options)

    def streamed() -> list[ChatCompletionChunk]:
        asked: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}, **options}
        return list(openai_client.chat.completions.create(model=NAME, messages=CHAT, **asked))

    chunks = streamed()
    assert {(chunk.id, chunk.object, chunk.model, chunk.created) for chunk in chunks} == {
        (chunks[0].id, "chat.completion.chunk", NAME, chunks[0].created)
    }
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.role for chunk in chunks[1:-1]] == [None] * (len(chunks) - 2)
    # Its tokens come together where Redis stood still meanwhile, as on a machine that is busy with others.
    wait_until(lambda: len(streamed()) > 4, "an answer comes in pieces")
    assert text_of(chunks) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 40
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens


def text_of(chunks: Iterable[ChatCompletionChunk], index: int = 0) -> str:
    choices = (choice for chunk in chunks for choice in chunk.choices)
    return "".join(choice.delta.content or "" for choice in choices if choice.index == index)


def test_each_chunk_tells_the_tokens_so_far(openai_client: OpenAI, llm: LLM) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "n": 2, "max_tokens": 6, "stream": True}
    options["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    options["extra_body"] = {"ignore_eos": True}
    *chunks, last = openai_client.chat.completions.create(model=NAME, messages=CHAT, **options)
    num_prompt_tokens = len(llm.chat(CHAT, SamplingParams(max_tokens=1))[0].prompt_token_ids)
    for index in range(2):
        usages = [chunk.usage for chunk in chunks if chunk.choices[0].index == index]
        assert {usage.prompt_tokens for usage in usages} == {num_prompt_tokens}
        counts = [usage.completion_tokens for usage in usages]
        assert counts == sorted(counts)
        assert (counts[0], counts[-1]) == (0, 6)
    assert (last.choices, last.usage.completion_tokens) == ([], 12)
    text: dict[str, Any] = {"prompt": PROMPTS, **options, "n": 1}
    *chunks, last = openai_client.completions.create(model=NAME, **text)
    ends = {chunk.choices[0].index: chunk.usage for chunk in chunks}
    assert sum(usage.prompt_tokens for usage in ends.values()) == last.usage.prompt_tokens
    assert [usage.completion_tokens for usage in ends.values()] == [6, 6]


def test_the_chat_template_is_told_what_the_request_says(openai_client: OpenAI) -> None:
    """The tests' template asks for nothing; what others make of it is tested with the prompts."""
    told = {"chat_template_kwargs": {"enable_thinking": False}}
    more: dict[str, Any] = {"max_tokens": 1, "reasoning_effort": "low", "extra_body": told}
    answer = openai_client.chat.completions.create(model=NAME, messages=CHAT, **more)
    assert answer.usage.completion_tokens == 1


def test_several_answers_are_the_engines_samples(openai_client: OpenAI, llm: LLM) -> None:
    options: dict[str, Any] = {"n": 3, "seed": 5, "temperature": 1.5, "max_tokens": 12}
    answer = openai_client.chat.completions.create(model=NAME, messages=CHAT, **options)
    generated = llm.chat(CHAT, SamplingParams(**options))[0]
    expected = [output.text for output in generated.outputs]
    assert answer.usage.prompt_tokens == len(generated.prompt_token_ids)
    assert answer.usage.completion_tokens == sum(len(output.token_ids) for output in generated.outputs)
    assert [choice.message.content for choice in answer.choices] == expected
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len(set(expected)) > 1
    chunks = list(openai_client.chat.completions.create(model=NAME, messages=CHAT, stream=True, **options))
    assert [text_of(chunks, index) for index in range(3)] == expected
    ended = [choice.index for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert sorted(ended) == [0, 1, 2]


def test_without_a_seed_answers_differ(openai_client: OpenAI) -> None:
    options: dict[str, Any] = {"temperature": 2, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    answers = [openai_client.chat.completions.create(model=NAME, messages=CHAT, **options) for _ in range(2)]
    assert len({answer.choices[0].message.content for answer in answers}) == 2


def test_logprobs_of_a_chat(openai_client: OpenAI, llm: LLM) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "logprobs": True, "top_logprobs": 2}
    answer = openai_client.chat.completions.create(model=NAME, messages=CHAT, **options).choices[0]
    expected = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=6, logprobs=2))[0].outputs[0]
    content = answer.logprobs.content
    assert len(content) == len(expected.token_ids)
    for entry, token, place in zip(content, expected.token_ids, expected.logprobs or (), strict=True):
        assert entry.token == place[token].decoded_token
        assert entry.logprob == pytest.approx(place[token].logprob, abs=1e-4)
        assert bytes(entry.bytes).decode() == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert len(entry.top_logprobs) == 2
    streamed = list(openai_client.chat.completions.create(model=NAME, messages=CHAT, stream=True, **options))
    entries = [
        entry
        for chunk in streamed
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content or ()
    ]
    assert [entry.token for entry in entries] == [entry.token for entry in content]
    assert text_of(streamed) == answer.message.content


def test_an_answer_ends_before_a_stop(openai_client: OpenAI, llm: LLM) -> None:
    free = llm.chat(CHAT, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))[0].outputs[0].text
    stop = free[6:9]
    options: dict[str, Any] = {"temperature": 0, "stop": [stop, "never"], "extra_body": {"ignore_eos": True}}
    answer = openai_client.chat.completions.create(model=NAME, messages=CHAT, **options).choices[0]
    assert answer.message.content == free[: free.index(stop)]
    assert answer.finish_reason == "stop"
    assert text_of(openai_client.chat.completions.create(model=NAME, messages=CHAT, stream=True, **options)) == (
        answer.message.content
    )


def test_a_conversation_goes_on_with_the_answer_as_it_came(openai_client: OpenAI, llm: LLM) -> None:
    parts = [{"type": "text", "text": "I was charged"}, {"type": "text", "text": "twice."}]
    chat: list[Any] = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    first = (
        openai_client.chat.completions.create(model=NAME, messages=chat, temperature=0, max_tokens=5).choices[0].message
    )
    chat += [first, {"role": "user", "content": "And my parcel?", "name": "Jo"}]
    answer = openai_client.chat.completions.create(model=NAME, messages=chat, temperature=0, max_tokens=5)
    plain: list[Any] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "I was charged\ntwice."},
        {"role": "assistant", "content": first.content},
        {"role": "user", "content": "And my parcel?"},
    ]
    expected = llm.chat(plain, SamplingParams(temperature=0, max_tokens=5))[0]
    assert answer.choices[0].message.content == expected.outputs[0].text
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)


def test_a_choice_among_texts(openai_client: OpenAI, llm: LLM) -> None:
    options: dict[str, Any] = {"temperature": 0, "extra_body": {"guided_choice": list(LABELS)}}
    answer = openai_client.chat.completions.create(model=NAME, messages=CHAT, **options)
    expected = llm.chat(CHAT, SamplingParams(temperature=0, choices=LABELS))[0].outputs[0].text
    assert answer.choices[0].message.content == expected
    assert text_of(openai_client.chat.completions.create(model=NAME, messages=CHAT, stream=True, **options)) == expected


def test_a_message_may_say_nothing(openai_client: OpenAI) -> None:
    """As with OpenAI and vLLM: the template says that it is the model's turn."""
    for content in ("", " ", [{"type": "text", "text": ""}]):
        messages: Any = [{"role": "user", "content": content}]
        answer = openai_client.chat.completions.create(model=NAME, messages=messages, max_tokens=1)
        assert answer.usage.completion_tokens == 1
    assert openai_client.responses.create(model=NAME, input="", max_output_tokens=1).object == "response"


def test_ratings_are_chosen_among(openai_client: OpenAI) -> None:
    for said in ({"guided_choice": [1, 2, 3]}, {"structured_outputs": {"choice": [1, 2, 3]}}):
        answer = openai_client.chat.completions.create(model=NAME, messages=CHAT, extra_body=said)
        assert answer.choices[0].message.content in ("1", "2", "3")


class Ticket(BaseModel):
    label: Literal["billing", "shipping"]
    urgent: bool


def test_an_answer_of_a_given_shape(openai_client: OpenAI) -> None:
    parsed = openai_client.chat.completions.parse(model=NAME, messages=CHAT, temperature=0, response_format=Ticket)
    assert isinstance(parsed.choices[0].message.parsed, Ticket)
    anything = openai_client.chat.completions.create(
        model=NAME, messages=CHAT, seed=1, max_tokens=200, response_format={"type": "json_object"}
    ).choices[0]
    if anything.finish_reason == "stop":
        assert isinstance(json.loads(anything.message.content or ""), dict)
    assert anything.message.content.lstrip().startswith("{")


def test_the_clients_own_helper_for_streams(openai_client: OpenAI) -> None:
    with openai_client.chat.completions.stream(model=NAME, messages=CHAT, temperature=0) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "".join(pieces) != ""


def test_completions_of_several_prompts(openai_client: OpenAI, llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    expected = llm.generate(PROMPTS, params)
    texts = [output.outputs[0].text for output in expected]
    options: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}
    answer = openai_client.completions.create(model=NAME, prompt=PROMPTS, **options)
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [
        (0, texts[0], "length"),
        (1, texts[1], "length"),
    ]
    assert (answer.object, answer.id[:5]) == ("text_completion", "cmpl-")
    assert answer.usage.prompt_tokens == sum(len(output.prompt_token_ids) for output in expected)
    assert answer.usage.completion_tokens == 32
    token_ids = [output.prompt_token_ids for output in expected]
    by_tokens = openai_client.completions.create(model=NAME, prompt=token_ids, echo=True, **options)
    assert [choice.text for choice in by_tokens.choices] == [
        prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)
    ]
    one = openai_client.completions.create(model=NAME, prompt=token_ids[1], **options)
    assert [choice.text for choice in one.choices] == [texts[1]]
    streamed = ["", ""]
    for chunk in openai_client.completions.create(model=NAME, prompt=PROMPTS, echo=True, stream=True, **options):
        for choice in chunk.choices:
            streamed[choice.index] += choice.text
    assert streamed == [choice.text for choice in by_tokens.choices]


def test_logprobs_of_a_completion(openai_client: OpenAI, llm: LLM) -> None:
    options: dict[str, Any] = {"temperature": 0, "logprobs": 2, "max_tokens": 8}
    answer = openai_client.completions.create(model=NAME, prompt=PROMPTS[0], **options).choices[0]
    expected = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=8, logprobs=2))[0].outputs[0]
    logprobs, num_tokens = answer.logprobs, len(expected.token_ids)
    own = [place[token] for token, place in zip(expected.token_ids, expected.logprobs or (), strict=True)]
    assert logprobs.tokens == [each.decoded_token for each in own]
    assert logprobs.token_logprobs == pytest.approx([each.logprob for each in own], abs=1e-4)
    assert [len(top) for top in logprobs.top_logprobs] == [2] * num_tokens
    assert logprobs.text_offset == [sum(map(len, logprobs.tokens[:place])) for place in range(num_tokens)]
    offsets = [
        offset
        for chunk in openai_client.completions.create(model=NAME, prompt=PROMPTS[0], stream=True, **options)
        if chunk.choices[0].logprobs
        for offset in chunk.choices[0].logprobs.text_offset
    ]
    assert offsets == logprobs.text_offset


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "tools that the template does not know": (
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        "tools",
        "invalid_value",
    ),
    "functions": ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    "audio": ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    "unknown field": ({"extra_body": {"temprature": 1}}, "temprature", "unknown_parameter"),
    "text for a number": ({"temperature": "1"}, "temperature", "invalid_type"),
    "out of range": ({"temperature": -1}, "temperature", "invalid_value"),
    "no answers": ({"n": 0}, "n", "invalid_value"),
    "several greedy answers": ({"n": 2, "temperature": 0}, "n", "invalid_value"),
    "two limits": ({"max_tokens": 2, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
    "options of no stream": ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    "unknown token": ({"logit_bias": {"999999": 1}}, "logit_bias", "invalid_value"),
    "bias of no token": ({"logit_bias": {"a": 1}}, "logit_bias", "invalid_value"),
    "bias of no number": ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "invalid_value"),
    "top_logprobs alone": ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    "no messages": ({"messages": []}, "messages", "invalid_value"),
    "unknown role": ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role", "invalid_value"),
    "role the model does not know": (
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]},
        "messages",
        "invalid_value",
    ),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages",
        "invalid_value",
    ),
    "a sound": (
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        "messages[0].content[0].type",
        "unsupported_parameter",
    ),
    "content that is none": ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "invalid_type"),
    "too long": (
        {"messages": [{"role": "user", "content": "word " * 5000}]},
        "messages",
        "context_length_exceeded",
    ),
}


@pytest.mark.parametrize(("changes", "param", "code"), REFUSED.values(), ids=REFUSED)
def test_what_can_not_be_answered_is_refused(
    openai_client: OpenAI, changes: dict[str, Any], param: str, code: str
) -> None:
    with pytest.raises(BadRequestError) as refused:
        openai_client.chat.completions.create(**{"model": NAME, "messages": CHAT, **changes})
    assert (refused.value.param, refused.value.code) == (param, code)
    assert refused.value.type == "invalid_request_error"
    # The words by which LiteLLM knows that another model is to be asked.
    assert ("this model's maximum context length is" in refused.value.message) == (code == "context_length_exceeded")


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [[999999]]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "word " * 5000}, "prompt"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_can_not_be_completed_is_refused(openai_client: OpenAI, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        openai_client.completions.create(**{"model": NAME, "prompt": "x", **changes})
    assert refused.value.param == param


def test_fields_that_ask_for_nothing_are_taken(openai_client: OpenAI) -> None:
    openai_client.chat.completions.create(
        model=NAME,
        messages=CHAT,
        max_completion_tokens=1,
        metadata={"a": "b"},
        store=False,
        user="jo",
        service_tier="auto",
        modalities=["text"],
        tool_choice="none",
        response_format={"type": "text"},
        top_p=None,
        stop=None,
    )


def test_an_unknown_model(openai_client: OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(NotFoundError) as refused:
            openai_client.chat.completions.create(model="gpt-9", messages=CHAT, stream=stream)
        assert (refused.value.code, refused.value.param) == ("model_not_found", "model")
        assert refused.value.request_id is None or refused.value.request_id.startswith("req_")


def test_many_at_once_with_the_async_client(api: ApiServer, llm: LLM) -> None:
    texts = [f"ticket {number}: where is my parcel?" for number in range(12)]
    chats: list[Any] = [[{"role": "user", "content": text}] for text in texts]
    expected = llm.chat(chats, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))

    async def ask(client: AsyncOpenAI, chat: Any) -> str:
        stream = await client.chat.completions.create(
            model=NAME, messages=chat, temperature=0, max_tokens=12, stream=True, extra_body={"ignore_eos": True}
        )
        return text_of([chunk async for chunk in stream])

    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0, timeout=90) as client:
            return await asyncio.gather(*(ask(client, chat) for chat in chats))

    assert asyncio.run(ask_all()) == [output.outputs[0].text for output in expected]


def test_keys_and_no_worker(tmp_path: Path) -> None:
    """A server of its own: one with a key, and without a worker."""
    with Client(Settings.from_environment(environment(tmp_path))) as own, in_process_server(own) as server:
        key = own.ledger.api_keys.create("jo").secret
        with OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0, timeout=90) as client:
            with pytest.raises(AuthenticationError):
                client.chat.completions.create(model=NAME, messages=CHAT)
            with pytest.raises(InternalServerError) as refused:
                client.with_options(api_key=key).chat.completions.create(model=NAME, messages=CHAT)
    error: APIStatusError = refused.value
    assert (error.status_code, error.code) == (503, "no_worker")
    assert "headrace worker --model" in error.message
    assert str(ROOT) not in error.message
    assert error.response.headers["Retry-After"]
