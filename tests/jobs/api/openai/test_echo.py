"""Prompts that come back with their tokens' log-probabilities: how evaluations score texts over plain completions."""

import json
from collections.abc import Callable
from operator import itemgetter
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from headrace import LLM, SamplingParams
from headrace.engine.offline.outputs import RequestOutput

from ...api_server import ApiServer
from ...running import MODEL

NAME = MODEL.name
# (The model's tokens are no longer than a character here and there: both have many.)
PROMPTS = ["The parcel is late, so I want a", "My card was charged twice. Ünïcödé, 漢字 😀"]


@pytest.fixture(scope="module")
def scored(llm: LLM) -> list[RequestOutput]:
    return llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1, logprobs=1, prompt_logprobs=1))


def expected_logprobs(output: RequestOutput, with_answer: bool) -> tuple[list[str], list[float], list[float]]:
    """The texts of a prompt's tokens and perhaps of its answer's; from the second on their own and the best's."""
    token_ids, places = list(output.prompt_token_ids), list(output.prompt_logprobs or ())
    if with_answer:
        token_ids += output.outputs[0].token_ids
        places += output.outputs[0].logprobs or ()
    known = [(token, place) for token, place in zip(token_ids, places, strict=True) if place is not None]
    own = [place[token] for token, place in known]
    best = [max(each.logprob for each in place.values()) for _, place in known]
    return [each.decoded_token or "" for each in own], [each.logprob for each in own], best


def assert_scored(logprobs: Any, output: RequestOutput, with_answer: bool) -> None:
    texts, own, best = expected_logprobs(output, with_answer)
    assert logprobs.tokens[1:] == texts
    assert (logprobs.token_logprobs[0], logprobs.top_logprobs[0]) == (None, None)
    assert logprobs.token_logprobs[1:] == pytest.approx(own, abs=1e-3)
    assert [max(top.values()) for top in logprobs.top_logprobs[1:]] == pytest.approx(best, abs=1e-3)
    num_prompt = len(output.prompt_token_ids)
    lengths = [sum(map(len, logprobs.tokens[:place])) for place in range(num_prompt)]
    assert logprobs.text_offset[:num_prompt] == lengths
    assert logprobs.text_offset[num_prompt:] == ([len(output.prompt or "")] if with_answer else [])


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_a_prompt_is_scored_as_by_the_engine(
    openai_client: OpenAI, scored: list[RequestOutput], max_tokens: int
) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "echo": True}
    answer = openai_client.completions.create(model=NAME, prompt=PROMPTS, **options)
    for choice, prompt, output in zip(answer.choices, PROMPTS, scored, strict=True):
        assert choice.text == prompt + (output.outputs[0].text if max_tokens else "")
        assert_scored(choice.logprobs, output, with_answer=bool(max_tokens))
    assert answer.usage.completion_tokens == 2 * max_tokens
    assert answer.usage.prompt_tokens == sum(len(output.prompt_token_ids) for output in scored)
    if not max_tokens:
        assert {choice.finish_reason for choice in answer.choices} == {"length"}


def test_what_lm_evaluation_harness_asks_and_reads(api: ApiServer, llm: LLM, scored: list[RequestOutput]) -> None:
    """The body that its `local-completions` model sends, and how it reads the answer to it."""
    contexts = [len(output.prompt_token_ids) // 2 for output in scored]
    greedy = llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0]
    continued = [*greedy.prompt_token_ids, *greedy.outputs[0].token_ids]
    prompts = [*(output.prompt_token_ids for output in scored), continued]
    body = {"model": NAME, "prompt": prompts, "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234}
    answer = api.post("/v1/completions", **body, echo=True)
    found = []
    begins = [*contexts, len(greedy.prompt_token_ids)]
    for choice, begin in zip(sorted(answer["choices"], key=itemgetter("index")), begins, strict=True):
        own = choice["logprobs"]["token_logprobs"][begin:-1]
        top = choice["logprobs"]["top_logprobs"][begin:-1]
        found.append((sum(own), all(each == max(best.values()) for each, best in zip(own, top, strict=True))))
    for (total, is_greedy), output, begin in zip(found, scored, contexts, strict=False):
        _, own, best = expected_logprobs(output, with_answer=False)
        assert total == pytest.approx(sum(own[begin - 1 :]), abs=1e-2)
        assert is_greedy == (own[begin - 1 :] == best[begin - 1 :])
    assert found[-1][1]
    assert not all(is_greedy for _, is_greedy in found)


def nearly(found: list[Any]) -> list[Any]:
    """Log-probabilities, or those of several tokens, to be compared within 1e-4."""
    return [pytest.approx(each, abs=1e-4) if each is not None else None for each in found]


@pytest.mark.parametrize("max_tokens", [0, 5])
def test_in_chunks_it_is_the_same(openai_client: OpenAI, max_tokens: int) -> None:
    options: dict[str, Any] = {
        "prompt": PROMPTS,
        "temperature": 1,
        "seed": 3,
        "n": 2,
        "max_tokens": max_tokens,
        "logprobs": 2,
        "echo": True,
        "extra_body": {"ignore_eos": True},
    }
    whole = openai_client.completions.create(model=NAME, **options)
    streamed: list[dict[str, Any]] = [{"text": "", "ends": []} for _ in whole.choices]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    for chunk in openai_client.completions.create(
        model=NAME, stream=True, stream_options={"include_usage": True}, **options
    ):
        for choice in chunk.choices:
            of_choice = streamed[choice.index]
            of_choice["text"] += choice.text
            of_choice["ends"] += [choice.finish_reason] if choice.finish_reason else []
            for name in names if choice.logprobs else ():
                of_choice.setdefault(name, []).extend(getattr(choice.logprobs, name))
    for choice, of_choice in zip(whole.choices, streamed, strict=True):
        expected = {name: getattr(choice.logprobs, name) for name in names}
        # In float32 a sum may depend on what else is computed with it.
        for name in ("token_logprobs", "top_logprobs"):
            assert of_choice.pop(name) == nearly(expected.pop(name))
        assert of_choice == {"text": choice.text, "ends": ["length"], **expected}
    assert chunk.usage == whole.usage
    assert whole.choices[0].text.startswith(PROMPTS[0])
    assert len({choice.text for choice in whole.choices}) == (4 if max_tokens else 2)


def test_an_echo_alone_and_what_has_none(openai_client: OpenAI) -> None:
    answer = openai_client.completions.create(model=NAME, prompt=PROMPTS, echo=True, max_tokens=0)
    assert [(choice.text, choice.logprobs) for choice in answer.choices] == [(text, None) for text in PROMPTS]
    streamed = openai_client.completions.create(model=NAME, prompt=PROMPTS[0], echo=True, max_tokens=0, stream=True)
    assert [chunk.choices[0].text for chunk in streamed] == [PROMPTS[0], ""]
    with pytest.raises(BadRequestError, match="without echo") as refused:
        openai_client.completions.create(model=NAME, prompt="x", max_tokens=0)
    assert refused.value.param == "max_tokens"
    with pytest.raises(BadRequestError) as refused:
        openai_client.completions.create(
            model=NAME, prompt="x", echo=True, logprobs=1, extra_body={"guided_choice": ["a", "b"]}
        )
    assert refused.value.param == "logprobs"


def test_a_job_has_them_as_a_column(api: ApiServer, llm: LLM, wait_until_done: Callable[[str], Any]) -> None:
    rows = [{"prompt": prompt} for prompt in PROMPTS]
    job = api.post("/jobs", model=api.model, rows=rows, sampling={"max_tokens": 1, "prompt_logprobs": 1})
    wait_until_done(job["id"])
    chats: list[Any] = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    scored = llm.chat(chats, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
    for row, output in zip(api.get(f"/jobs/{job['id']}/results")["data"], scored, strict=True):
        texts, own, _ = expected_logprobs(output, with_answer=False)
        assert [entry["token"] for entry in row["prompt_logprobs"][1:]] == texts
        assert [entry["logprob"] for entry in row["prompt_logprobs"][1:]] == pytest.approx(own, abs=1e-3)


def test_a_stream_that_is_read_again_has_them_too(api: ApiServer) -> None:
    body = {"model": NAME, "prompt": PROMPTS[0], "echo": True, "logprobs": 0, "max_tokens": 3, "temperature": 0}
    response = api.http.post("/v1/completions", json=body | {"ignore_eos": True})
    logprobs = response.json()["choices"][0]["logprobs"]
    raw = api.http.get(f"/requests/{response.headers['x-request-id']}/stream").text
    first, *others = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: ")]
    of_prompt = [entry["logprob"] for entry in first["prompt_logprobs"]]
    assert of_prompt == logprobs["token_logprobs"][:-3]
    assert not any("prompt_logprobs" in event for event in others)


def test_a_batch_has_the_same(openai_client: Any, wait_until: Callable[..., None]) -> None:
    options: dict[str, Any] = {"model": NAME, "temperature": 1, "seed": 3, "logprobs": 1, "echo": True}
    bodies = {
        "alone": {**options, "prompt": PROMPTS[1], "max_tokens": 0},
        "two": {**options, "prompt": PROMPTS[0], "max_tokens": 2, "n": 2},
        "plain": {"model": NAME, "temperature": 0, "prompt": PROMPTS[0], "max_tokens": 2},
    }
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body} for name, body in bodies.items()
    ]
    text = "\n".join(map(json.dumps, lines))
    file = openai_client.files.create(file=("lines.jsonl", text.encode()), purpose="batch")
    batch = openai_client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
    wait_until(lambda: openai_client.batches.retrieve(batch.id).status == "completed", "the batch is done")
    done = openai_client.batches.retrieve(batch.id)
    answers = {
        line["custom_id"]: line
        for line in map(json.loads, openai_client.files.content(done.output_file_id).text.splitlines())
    }
    for name, body in bodies.items():
        live = openai_client.completions.create(**body).model_dump()
        stored = answers[name]["response"]["body"]
        for one, other in zip(stored["choices"], live["choices"], strict=True):
            assert (one["text"], one["finish_reason"]) == (other["text"], other["finish_reason"])
            if other["logprobs"] is None:
                assert one["logprobs"] is None
                continue
            assert one["logprobs"]["tokens"] == other["logprobs"]["tokens"]
            assert one["logprobs"]["text_offset"] == other["logprobs"]["text_offset"]
            assert one["logprobs"]["token_logprobs"][0] is None
            assert one["logprobs"]["token_logprobs"][1:] == pytest.approx(
                other["logprobs"]["token_logprobs"][1:], abs=1e-3
            )
        assert stored["usage"]["completion_tokens"] == live["usage"]["completion_tokens"]
