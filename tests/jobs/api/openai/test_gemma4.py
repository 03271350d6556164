"""Chats with a model that thinks and calls tools as Gemma 4 does."""

from pathlib import Path
from typing import Any

import pytest

from headrace.engine.text.tokenizer import Tokenizer
from headrace.jobs.api.openai.chat_schemas import ChatCompletionRequest
from headrace.jobs.api.openai.expected_calls import expected_calls
from headrace.jobs.api.openai.reasoning import ReasoningParser, with_reasoning
from headrace.jobs.calls.events import merged_calls
from headrace.jobs.live.text import GrowingText
from headrace.jobs.planning.rendering import PromptRenderer
from headrace.jobs.spec.sampling import SamplingSpec
from headrace.jobs.spec.schemas import JobSpec
from headrace.jobs.streams.events import StreamEvent

from ....engine.gemma4_chats import gemma4_copy
from ...running import MODEL

CHAT: list[Any] = [{"role": "user", "content": "I was charged twice this month."}]
TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
THOUGHT = "<|channel>thought\nHm.\n<channel|>"
# What the model writes, what it thought, what it says, what it calls with.
WRITTEN = {
    "a call after thinking": (
        THOUGHT + '<|tool_call>call:look{at:<|"|>1<|"|>}<tool_call|>',
        "Hm.",
        "",
        ['{"at": "1"}'],
    ),
    "two calls": ("<|tool_call>call:look{at:1}<tool_call|>" * 2, "", "", ['{"at": 1}'] * 2),
    "an answer": (THOUGHT + "Look at it.", "Hm.", "Look at it.", []),
    "thoughts alone": (THOUGHT.removesuffix("\n<channel|>"), "Hm.", "", []),
    "no thoughts": ("<|channel>thought\n<channel|>Look.", "", "Look.", []),
}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(gemma4_copy(MODEL, tmp_path / "gemma"))


def chat(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"model": "m", "messages": CHAT, **fields})


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("case", WRITTEN)
def test_an_answer_is_parted(tokenizer: Tokenizer, case: str, is_whole: bool) -> None:
    """Whether its tokens come one by one or it is parted when it is complete."""
    text, thought, said, calls = WRITTEN[case]
    form, thinking = expected_calls(chat(tools=[TOOL]), tokenizer), tokenizer.reasoning(True)
    assert form is not None
    assert thinking is not None
    told = {"enable_thinking": True}
    prompt = tokenizer.encode(tokenizer.apply_chat_template(CHAT, told, [TOOL]), add_special_tokens=False)
    written = tokenizer.encode(text, add_special_tokens=False)
    if is_whole:
        split = thinking.split(prompt, written)
        reasoning = tokenizer.decode(split.reasoning).strip()
        events = [form.parser("").add(StreamEvent(1, text=tokenizer.decode(split.answer), finish_reason="stop"))]
    else:
        growing = GrowingText(tokenizer, (), thinking.tracker(prompt))
        parts, parser = ReasoningParser(tokenizer, prompt, True, False), form.parser("")
        tokens = [StreamEvent(n, (token,), (growing.add(token),)) for n, token in enumerate(written, 1)]
        assert "".join(event.texts[0] for event in tokens) == text
        parted = [parts.add(each) for each in [*tokens, StreamEvent(len(written) + 1, finish_reason="stop")]]
        reasoning = "".join(each.reasoning for each in parted)
        events = [parser.add(each) for each in parted]
    assert (reasoning, "".join(event.text for event in events)) == (thought, said)
    assert [call["function"]["arguments"] for call in merged_calls(events)] == calls
    assert events[-1].finish_reason == ("tool_calls" if calls else "stop")


@pytest.mark.parametrize(
    ("fields", "is_parted"),
    [
        ({}, False),
        ({"reasoning_effort": "low"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"include_reasoning": True}, True),
    ],
)
def test_thinking_is_parted_where_it_was_asked_for(tokenizer: Tokenizer, fields: Any, is_parted: bool) -> None:
    asked = chat(**fields)
    sampling = with_reasoning(SamplingSpec(), tokenizer, asked.told_template, asked.include_reasoning, None)
    assert sampling.reasoning is is_parted


def test_jobs_prompts_tell_it_to_think(tokenizer: Tokenizer) -> None:
    def rendered(**spec: Any) -> Any:
        job = JobSpec.parse(model="m", prompt="{text}", **spec)
        return PromptRenderer(job, tokenizer, ["text"]).render({"text": "Hi"})

    asked, thinking = "<|turn>user\nHi<turn|>\n<|turn>model\n", {"sampling": {"reasoning": True}}
    silent = f"<bos>{asked}<|channel>thought\n<channel|>"
    assert rendered() == silent
    assert rendered(**thinking) == f"<bos><|turn>system\n<|think|>\n<turn|>\n{asked}"
    assert rendered(**thinking, chat_template_kwargs={"enable_thinking": False}) == silent
    # Of a batch each request says it itself.
    batch = {"endpoint": "/v1/chat/completions", "prompt": None, **thinking}
    row = {"messages": CHAT}
    assert "<|think|>" not in str(PromptRenderer(JobSpec.parse(model="m", **batch), tokenizer, [*row]).render(row))
