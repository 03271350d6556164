"""A model that thinks, as users have it: jobs, their verification, chats and batches with the official client."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from headrace.engine.text.tokenizer import Tokenizer
from headrace.jobs.client.client import Client
from headrace.jobs.settings import Settings

from ....engine.thinking import thinking_copy
from ...running import LABELS, MODEL, Result, environment, results
from ..batch_lines import chat_line, create, file_lines, wait_for
from ..thinker import Thinker, serving

CHAT: list[Any] = [{"role": "user", "content": "I was charged twice this month."}]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinker]:
    data_dir = tmp_path_factory.mktemp("thinker")
    with serving(data_dir, thinking_copy(MODEL, data_dir / "thinking-model")) as served:
        yield served


def test_a_chat_is_parted(thinker: Thinker) -> None:
    for options in ({"guided_choice": list(LABELS)}, {"structured_outputs": {"regex": "[0-9]{3,5}"}}):
        extra = {"include_reasoning": True, "thinking_token_budget": 9, **options}
        name = thinker.model.name
        answer = thinker.openai.chat.completions.create(
            model=name, messages=CHAT, temperature=0, max_tokens=40, extra_body=extra
        )
        message: Any = answer.choices[0].message
        assert message.reasoning == message.reasoning_content != ""
        assert message.content in LABELS or (message.content.isdigit() and len(message.content) in (3, 4, 5))
        usage: Any = answer.usage
        # With its markers.
        assert usage.completion_tokens_details.reasoning_tokens == 11
        assert usage.completion_tokens > 11
        chunks = list(
            thinker.openai.chat.completions.create(
                model=name,
                messages=CHAT,
                temperature=0,
                max_tokens=40,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=extra,
            )
        )
        deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == message.reasoning
        assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas) == message.reasoning
        assert "".join(delta.content or "" for delta in deltas) == message.content
        assert chunks[-1].usage == usage
        hidden: Any = thinker.openai.chat.completions.create(
            model=name,
            messages=CHAT,
            temperature=0,
            max_tokens=40,
            extra_body={**extra, "include_reasoning": False},
        )
        assert hidden.choices[0].message.content == message.content
        assert not hasattr(hidden.choices[0].message, "reasoning")


def test_an_answer_with_its_thinking_can_be_sent_back_as_it_came(thinker: Thinker) -> None:
    extra = {"include_reasoning": True, "thinking_token_budget": 5, "guided_choice": list(LABELS)}
    options: dict[str, Any] = {"model": thinker.model.name, "temperature": 0, "max_tokens": 9}
    create = thinker.openai.chat.completions.create
    said: Any = create(messages=CHAT, **options, extra_body=extra).choices[0].message
    assert said.reasoning
    turns: list[Any] = [said, {"role": "assistant", "content": said.content}]
    # As the template shows no earlier turn's.
    told, untold = (create(messages=[*CHAT, turn, *CHAT], **options) for turn in turns)
    assert told.choices == untold.choices
    assert told.usage.prompt_tokens == untold.usage.prompt_tokens


def test_logprobs_of_a_held_answer_are_those_of_its_text(thinker: Thinker) -> None:
    """Not of the line breaks that are written between the thinking and the answer."""
    name = thinker.model.name
    extra = {"include_reasoning": True, "thinking_token_budget": 9, "structured_outputs": {"regex": "[0-9]{3,5}"}}
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "logprobs": True}
    done = wait_for(thinker.openai, create(thinker.openai, [chat_line("held", "Where?", model=name, **asked, **extra)]))
    (choice,) = file_lines(thinker.openai, done.output_file_id)["held"]["response"]["body"]["choices"]
    said = "".join(each["token"] for each in choice["logprobs"]["content"])
    assert said.startswith(choice["message"]["content"])
    live = thinker.openai.chat.completions.create(model=name, messages=CHAT, **asked, extra_body=extra).choices[0]
    assert live.logprobs is not None
    said = "".join(each.token for each in live.logprobs.content or ())
    assert said.startswith(live.message.content or "none")


def test_a_model_that_does_not_think_has_nothing_to_part(openai_client: OpenAI) -> None:
    options: Any = {"model": MODEL.name, "messages": CHAT, "temperature": 0}
    plain = openai_client.chat.completions.create(**options)
    asked = openai_client.chat.completions.create(**options, extra_body={"include_reasoning": True})
    assert asked.choices[0].message == plain.choices[0].message
    with pytest.raises(BadRequestError, match="the model does not think"):
        openai_client.chat.completions.create(**options, extra_body={"thinking_token_budget": 3})


def test_a_batch_writes_both(thinker: Thinker, headrace: Callable[..., Result]) -> None:
    extra = {"model": thinker.model.name, "max_tokens": 30, "thinking_token_budget": 5}
    lines = [
        chat_line("told", "Where is it?", **extra, include_reasoning=True, logprobs=True),
        chat_line("hidden", "Where is it?", **extra, include_reasoning=False),
        chat_line("plain", "Where is it?", model=thinker.model.name, max_tokens=5, ignore_eos=True),
    ]
    done = wait_for(thinker.openai, create(thinker.openai, lines))
    bodies = {name: line["response"]["body"] for name, line in file_lines(thinker.openai, done.output_file_id).items()}
    messages = {name: body["choices"][0]["message"] for name, body in bodies.items()}
    assert messages["told"]["reasoning"]
    assert "reasoning" not in messages["hidden"]
    assert "reasoning" not in messages["plain"]
    counts = {name: body["usage"]["completion_tokens_details"]["reasoning_tokens"] for name, body in bodies.items()}
    assert counts == {"told": 7, "hidden": 7, "plain": 0}
    assert done.usage.output_tokens_details.reasoning_tokens == 14
    # Of what is said, as in a chat.
    said = bodies["told"]["choices"][0]["logprobs"]["content"]
    assert len(said) == bodies["told"]["usage"]["completion_tokens"] - 7
    verified = headrace(thinker.data_dir, "verify", done.id)
    assert verified.status == 0, verified


CITY = {"type": "object", "properties": {"city": {"enum": ["Ulm"]}}, "required": ["city"]}
TOOL = {"name": "find", "parameters": {"type": "object", "properties": {}}}


@pytest.fixture(scope="module")
def braces(thinker: Thinker) -> tuple[dict[str, int], dict[str, int]]:
    """Biases with which the model calls a function at once, without blanks, and with which it does not."""
    tokenizer = Tokenizer.from_pretrained(thinker.model)
    texts = [tokenizer.decode([token]) for token in range(tokenizer.vocab_size)]
    opening, closing, blanks = (
        [str(token) for token, text in enumerate(texts) if text.startswith(those)]
        for those in ("{", "}", (" ", "\r", "\n", "\t"))
    )
    return dict.fromkeys(opening + blanks, -100) | dict.fromkeys(closing, 100), dict.fromkeys(opening, 100)


@pytest.mark.parametrize("thinking", [{}, {"include_reasoning": True, "thinking_token_budget": 5}])
def test_beside_a_form_the_model_may_call(thinker: Thinker, braces: Sequence[dict[str, int]], thinking: Any) -> None:
    """As agents send both with every request."""
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY}}
    tools = [{"type": "function", "function": TOOL}]
    options: Any = {"model": thinker.model.name, "temperature": 0, "max_tokens": 120, "response_format": form}
    options |= {"tools": tools, "parallel_tool_calls": False}
    lines = [chat_line(str(number), **options, **thinking, logit_bias=bias) for number, bias in enumerate(braces)]
    done = wait_for(thinker.openai, create(thinker.openai, lines))
    bodies = {name: line["response"]["body"] for name, line in file_lines(thinker.openai, done.output_file_id).items()}
    live = [
        thinker.openai.chat.completions.create(
            messages=lines[0]["body"]["messages"], **options, logit_bias=bias, extra_body=thinking
        ).to_dict()
        for bias in braces
    ]
    for number, response in enumerate((*live, bodies["0"], bodies["1"])):
        [choice] = response["choices"]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        assert bool(message.get("reasoning")) == bool(thinking)
        if number % 2:
            assert (json.loads(message["content"]), calls, choice["finish_reason"]) == ({"city": "Ulm"}, [], "stop")
        else:
            call = {"name": "find", "arguments": "{}"}
            assert (message["content"], calls, choice["finish_reason"]) == (None, [call], "tool_calls")


def test_the_model_is_shown_the_tools_that_are_allowed(thinker: Thinker) -> None:
    options: Any = {"temperature": 0, "max_tokens": 1}
    tools: Any = [{"type": "function", "function": {**TOOL, "name": name}} for name in ("find", "close")]
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "close"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    shown: list[Any] = [{"tools": tools, "tool_choice": choice}, {"tools": tools[1:]}, {"tools": tools}]
    lines = [chat_line(str(number), **options, model=thinker.model.name, **each) for number, each in enumerate(shown)]
    create_chat: Any = thinker.openai.chat.completions.create
    live = [create_chat(**line["body"]).usage.prompt_tokens for line in lines]
    done = wait_for(thinker.openai, create(thinker.openai, lines))
    found = file_lines(thinker.openai, done.output_file_id)
    for counts in (live, [found[str(number)]["response"]["body"]["usage"]["prompt_tokens"] for number in range(3)]):
        assert counts[0] == counts[1] < counts[2]


def test_of_several_answers_each_has_its_own(thinker: Thinker) -> None:
    asked: dict[str, Any] = {"temperature": 1.5, "seed": 7, "n": 3, "max_tokens": 30}
    told: dict[str, Any] = {"include_reasoning": True, "thinking_token_budget": 5}
    line = chat_line("several", CHAT[0]["content"], model=thinker.model.name, **asked, **told)
    live = thinker.openai.chat.completions.create(model=thinker.model.name, messages=CHAT, **asked, extra_body=told)
    expected = [choice.message.to_dict() for choice in live.choices]
    assert len({message["reasoning"] for message in expected}) == 3
    done = wait_for(thinker.openai, create(thinker.openai, [line]))
    body = file_lines(thinker.openai, done.output_file_id)["several"]["response"]["body"]
    assert [choice["message"] for choice in body["choices"]] == expected


@pytest.mark.parametrize("options", [("--choices", ",".join(LABELS)), ("--regex", "[a-z]{3,8}"), ()])
def test_a_job_is_made_again_as_it_was(
    thinker: Thinker, headrace: Callable[..., Result], few: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    output = tmp_path / "out"
    sampling = ("--max-tokens", "40", "--temperature", "0.8", "--reasoning", "--thinking-token-budget", "12")
    arguments = (few, "--model", thinker.model, "--prompt", "{text}", *options, *sampling)
    ran = headrace(thinker.data_dir, "run", *arguments, "--output", output)
    assert ran.status == 0, ran
    rows = results(output).to_pylist()
    assert len(rows) == 12
    for row in rows:
        # A free answer may end in the thinking.
        assert row["reasoning"] or not options
        assert row["reasoning_tokens"] <= 14
        assert "think>" not in row["output"]
        if options[:1] == ("--choices",):
            assert row["label"] in LABELS
        elif options:
            assert row["output"].isalpha()
    verified = headrace(thinker.data_dir, "verify", output, "--rows", "12")
    assert verified.status == 0, verified


def test_a_stream_shows_what_is_thought(thinker: Thinker) -> None:
    settings = Settings.from_environment(environment(thinker.data_dir))
    with Client(settings) as client:
        options: dict[str, Any] = {"reasoning": True, "thinking_token_budget": 4, "max_tokens": 9}
        text = client.generate("Where is it?", thinker.model, **options).text
    assert text.startswith("<think>")
    assert "</think>" in text


def test_the_python_face_takes_it_too(thinker: Thinker, tmp_path: Path) -> None:
    settings = Settings.from_environment(environment(thinker.data_dir))
    with Client(settings) as client:
        rows = [{"text": "Where is it?"}]
        options: dict[str, Any] = {"reasoning": True, "max_tokens": 20, "choices": LABELS}
        job = client.submit(rows, thinker.model, tmp_path / "out", prompt="{text}", **options)
        job.wait(120, start_worker=False)
        [row] = job.results().to_pylist()
    assert row["reasoning"]
    assert row["completion_tokens"] > row["reasoning_tokens"] > 0
