"""A model that writes in harmony's format, as users have it: jobs, chats and batches are its final messages."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError

from headrace.engine.text.tokenizer import Tokenizer
from headrace.jobs.api.openai.chat_schemas import ChatCompletionRequest
from headrace.jobs.api.openai.expected_calls import expected_calls
from headrace.jobs.api.openai.reasoning import ReasoningParser
from headrace.jobs.calls.events import merged_calls
from headrace.jobs.client.client import Client
from headrace.jobs.live.asking import new_request
from headrace.jobs.live.text import GrowingText
from headrace.jobs.planning.rendering import PromptRenderer
from headrace.jobs.settings import Settings
from headrace.jobs.spec.schemas import JobSpec
from headrace.jobs.streams.events import StreamEvent

from ....engine.harmony import harmony_copy
from ...running import LABELS, MODEL, Result, environment, results
from ..batch_lines import chat_line, create, file_lines, wait_for
from ..thinker import Thinker, serving

CHAT: list[Any] = [{"role": "user", "content": "I was charged twice this month."}]
ENDING = "<|end|><|start|>assistant"
HEADER = "<|channel|>final<|message|>"
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinker]:
    data_dir = tmp_path_factory.mktemp("harmony")
    with serving(data_dir, harmony_copy(MODEL, data_dir / "harmony-model")) as served:
        yield served


@pytest.fixture(scope="module")
def num_markers(thinker: Thinker) -> int:
    """Of the thinking's beginning and its end together."""
    markers = f"<|channel|>analysis<|message|>{ENDING}{HEADER}"
    return len(Tokenizer.from_pretrained(thinker.model).encode(markers, add_special_tokens=False))


def test_a_chat_is_the_final_message(thinker: Thinker, num_markers: int) -> None:
    """It thinks unless it is told not to, and says so."""
    for options in ({"guided_choice": list(LABELS)}, {"structured_outputs": {"regex": "[0-9]{3,5}"}}):
        extra = {"thinking_token_budget": 9, **options}
        asked: dict[str, Any] = {"model": thinker.model.name, "messages": CHAT, "temperature": 0, "max_tokens": 60}
        answer = thinker.openai.chat.completions.create(**asked, extra_body=extra)
        message: Any = answer.choices[0].message
        assert message.reasoning
        assert "analysis" not in message.reasoning
        assert message.content in LABELS or message.content.isdigit()
        usage: Any = answer.usage
        assert usage.completion_tokens_details.reasoning_tokens == 9 + num_markers
        chunks = list(
            thinker.openai.chat.completions.create(
                **asked, stream=True, stream_options={"include_usage": True}, extra_body=extra
            )
        )
        deltas: list[Any] = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(getattr(delta, "reasoning", "") for delta in deltas) == message.reasoning
        assert "".join(delta.content or "" for delta in deltas) == message.content
        assert chunks[-1].usage == usage


def test_a_chat_thinks_without_being_asked(thinker: Thinker) -> None:
    answer = thinker.openai.chat.completions.create(
        model=thinker.model.name, messages=CHAT, max_tokens=9, seed=1, extra_body={"guided_choice": list(LABELS)}
    )
    message: Any = answer.choices[0].message
    assert message.content in LABELS
    assert message.reasoning
    hidden: Any = thinker.openai.chat.completions.create(
        model=thinker.model.name,
        messages=CHAT,
        max_tokens=9,
        seed=1,
        extra_body={"guided_choice": list(LABELS), "include_reasoning": False},
    )
    assert hidden.choices[0].message.content == message.content
    assert not hasattr(hidden.choices[0].message, "reasoning")


def test_a_chat_that_is_not_to_think(thinker: Thinker) -> None:
    answer = thinker.openai.chat.completions.create(
        model=thinker.model.name, messages=CHAT, temperature=0, max_tokens=8, reasoning_effort="none"
    )
    message: Any = answer.choices[0].message
    assert message.content
    assert not message.reasoning
    usage: Any = answer.usage
    assert usage.completion_tokens_details.reasoning_tokens == 0


WRITTEN = {
    "a call": ("commentary to=functions.look <|message|>", '{"at": [1]}', ""),
    "its recipient in front": (None, '{"at": [1]}', ""),
    "none": ("final<|message|>", "", "Look at it."),
    "another tool": ("analysis to=python code<|message|>", "", "=python code1 + 1"),
}


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("case", WRITTEN)
def test_a_message_to_a_function_is_a_call(tmp_path: Path, case: str, is_whole: bool) -> None:
    """As the model writes it, whether its tokens come one by one or the answer is parted when it is complete."""
    channel, arguments, said = WRITTEN[case]
    header = f"<|channel|>{channel}" if channel else " to=functions.look<|channel|>commentary <|message|>"
    said_last = arguments or said.removeprefix("=python code")
    tokenizer = Tokenizer.from_pretrained(harmony_copy(MODEL, tmp_path))
    body = ChatCompletionRequest.model_validate({"model": "m", "messages": CHAT, "tools": [TOOL]})
    form = expected_calls(body, tokenizer)
    assert form is not None
    prompt = tokenizer.encode("<|start|>assistant", add_special_tokens=False)
    written = tokenizer.encode(f"<|channel|>analysis<|message|>Hm.{ENDING}{header}{said_last}", False)
    thinking = tokenizer.reasoning(True)
    assert thinking is not None
    if is_whole:
        split = thinking.split(prompt, written)
        reasoning = tokenizer.decode(split.reasoning)
        event = form.parser("").add(StreamEvent(1, text=tokenizer.decode(split.answer), finish_reason="stop"))
        events = [event]
    else:
        growing = GrowingText(tokenizer, (), thinking.tracker(prompt))
        parts, calls = ReasoningParser(tokenizer, prompt, True, False), form.parser("")
        tokens = [StreamEvent(n, (token,), (growing.add(token),)) for n, token in enumerate(written, 1)]
        thought = [parts.add(each) for each in [*tokens, StreamEvent(len(written) + 1, finish_reason="stop")]]
        reasoning = "".join(each.reasoning for each in thought)
        events = [calls.add(each) for each in thought]
    assert reasoning == "Hm."
    called = [(call["function"]["name"], call["function"]["arguments"]) for call in merged_calls(events)]
    assert called == ([("look", arguments)] if arguments else [])
    assert "".join(event.text for event in events) == said
    assert events[-1].finish_reason == ("tool_calls" if arguments else "stop")


def test_functions_that_it_may_or_has_to_call(thinker: Thinker) -> None:
    asked: dict[str, Any] = {"model": thinker.model.name, "messages": CHAT, "tools": [TOOL], "temperature": 0}
    free = thinker.openai.chat.completions.create(**asked, max_tokens=8)
    assert free.choices[0].finish_reason in ("stop", "length", "tool_calls")
    with pytest.raises(BadRequestError, match="thinking_token_budget: the final message follows"):
        thinker.openai.chat.completions.create(**asked, extra_body={"thinking_token_budget": 3})
    answer = thinker.openai.chat.completions.create(
        **asked, tool_choice="required", max_tokens=90, extra_body={"thinking_token_budget": 3}
    )
    calls: Any = answer.choices[0].message.tool_calls
    assert [call.function.name for call in calls][:1] == ["look"]


def test_a_batch_is_parted_too(thinker: Thinker, num_markers: int) -> None:
    extra = {"model": thinker.model.name, "max_tokens": 60, "structured_outputs": {"regex": "[0-9]{3,5}"}}
    lines = [
        chat_line("thought", "Where is it?", **extra, thinking_token_budget=5),
        chat_line("plain", "Where is it?", **extra, chat_template_kwargs={"enable_thinking": False}),
    ]
    done = wait_for(thinker.openai, create(thinker.openai, lines))
    bodies = {name: line["response"]["body"] for name, line in file_lines(thinker.openai, done.output_file_id).items()}
    assert all(body["choices"][0]["message"]["content"].isdigit() for body in bodies.values())
    counts = {name: body["usage"]["completion_tokens_details"]["reasoning_tokens"] for name, body in bodies.items()}
    assert counts == {"thought": 5 + num_markers, "plain": 0}


@pytest.mark.parametrize("thinking", [(), ("--reasoning", "--thinking-token-budget", "8")], ids=["plain", "thinking"])
@pytest.mark.parametrize("options", [("--choices", ",".join(LABELS)), ("--regex", "[a-z]{3,8}"), ()])
def test_a_job_thinks_where_it_is_to(
    thinker: Thinker, headrace: Callable[..., Result], few: Path, tmp_path: Path, options: Any, thinking: Any
) -> None:
    output = tmp_path / "out"
    arguments = (few, "--model", thinker.model, "--prompt", "{text}", *options, "--max-tokens", "40", *thinking)
    ran = headrace(thinker.data_dir, "run", *arguments, "--output", output)
    assert ran.status == 0, ran
    rows = results(output).to_pylist()
    assert len(rows) == 12
    for row in rows:
        assert ("reasoning" in row) == bool(thinking)
        # A free answer may end in the thinking.
        assert bool(row.get("reasoning")) == bool(thinking) or not options
        assert not any(word in row["output"] for word in ("analysis", "assistant"))
        if options[:1] == ("--choices",):
            assert row["label"] in LABELS
        elif options:
            assert row["output"].isalpha()
    assert any(row["output"] for row in rows) or (thinking and not options)
    verified = headrace(thinker.data_dir, "verify", output, "--rows", "12")
    assert verified.status == 0, verified


def test_a_stream_shows_what_is_thought_as_the_model_writes_it(thinker: Thinker) -> None:
    with Client(Settings.from_environment(environment(thinker.data_dir))) as client:
        options: dict[str, Any] = {"reasoning": True, "thinking_token_budget": 4, "max_tokens": 40}
        text = client.generate("Where is it?", thinker.model, **options).text
        assert text.startswith("<|channel|>analysis<|message|>")
        assert f"{ENDING}{HEADER}" in text
        plain = client.generate("Where is it?", thinker.model, max_tokens=8).text
    assert plain
    assert "<|" not in plain


def test_prompts_begin_the_answers_of_those_that_do_not_think(tmp_path: Path) -> None:
    model = harmony_copy(MODEL, tmp_path)
    tokenizer = Tokenizer.from_pretrained(model)

    def rendered(**spec: Any) -> Any:
        job = JobSpec.parse(model="m", prompt="{text}", **spec)
        return PromptRenderer(job, tokenizer, ["text"]).render({"text": "Hi"})

    assert rendered() == f"<|start|>user<|message|>Hi{ENDING}{HEADER}"
    assert rendered(sampling={"reasoning": True}) == f"<|start|>user<|message|>Hi{ENDING}"
    assert rendered(chat_template_kwargs={"enable_thinking": True}) == f"<|start|>user<|message|>Hi{ENDING}"
    for thinks in (False, True):
        asked = new_request("Hi", model, reasoning=thinks)
        text = tokenizer.fast.decode(list(asked.prompt_token_ids), skip_special_tokens=False)
        assert text == f"<|start|>user<|message|>Hi{ENDING}{'' if thinks else HEADER}"
