"""Answers that go on from a last message, as vLLM's server gives them: live, streamed, in batches, and as responses."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from headrace import LLM, SamplingParams
from headrace.jobs.api.openai.request_body import parse_body
from headrace.jobs.api.openai.response_schemas import ResponsesRequest
from headrace.jobs.batches.lines import BatchLine
from headrace.jobs.batches.requests import RequestReader
from headrace.jobs.live.prompt import LivePrompts
from headrace.jobs.shards.row_sampling import RowSampling

from ....engine.harmony import harmony_copy
from ....engine.thinking import thinking_copy
from ...running import MODEL
from ..batch_lines import CHAT, chat_line, create, file_lines, wait_for

NAME = MODEL.name
QUESTION: Any = {"role": "user", "content": "Where is my parcel?"}
BEGUN: list[Any] = [QUESTION, {"role": "assistant", "content": "ship"}]
WITHIN: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
OPTIONS: Any = {"model": NAME, "temperature": 0, "max_tokens": 4}


@pytest.fixture(scope="module")
def continuation(llm: LLM) -> str:
    """By the engine itself."""
    params = SamplingParams(temperature=0, max_tokens=4)
    [output] = llm.chat(BEGUN, params, add_generation_prompt=False, continue_final_message=True)
    assert output.prompt == "<|user|>Where is my parcel?<|end|><|assistant|>ship"
    return output.outputs[0].text


def test_an_answer_goes_on_from_the_last_message(openai_client: OpenAI, continuation: str) -> None:
    complete = openai_client.chat.completions.create
    said = complete(messages=BEGUN, **OPTIONS, extra_body=WITHIN)
    assert said.choices[0].message.content == continuation
    whole = complete(messages=BEGUN, **OPTIONS, extra_body=WITHIN | {"echo": True})
    assert whole.choices[0].message.content == f"ship{continuation}"
    chunks = complete(messages=BEGUN, **OPTIONS, extra_body=WITHIN | {"echo": True}, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == f"ship{continuation}"
    # An answer of its own is another, and the user's words are not its.
    alone = complete(messages=[QUESTION], **OPTIONS)
    assert alone.usage.prompt_tokens == said.usage.prompt_tokens - 1
    assert complete(messages=[QUESTION], **OPTIONS, extra_body={"echo": True}).choices == alone.choices


def test_a_line_of_a_batch_does_too(openai_client: OpenAI, continuation: str) -> None:
    lines = [
        chat_line("on", **WITHIN, messages=BEGUN),
        chat_line("echo", messages=BEGUN, **WITHIN, echo=True),
        chat_line("new", messages=BEGUN),
        chat_line("both", messages=BEGUN, continue_final_message=True),
    ]
    done = wait_for(openai_client, create(openai_client, lines))
    bodies = {name: line["response"]["body"] for name, line in file_lines(openai_client, done.output_file_id).items()}
    said = {name: body["choices"][0]["message"]["content"] for name, body in bodies.items()}
    live = openai_client.chat.completions.create(messages=BEGUN, **OPTIONS)
    assert said == {"on": continuation, "echo": f"ship{continuation}", "new": live.choices[0].message.content}
    [refused] = file_lines(openai_client, done.error_file_id).values()
    assert refused["response"]["body"]["error"]["param"] == "continue_final_message"


def test_a_response_goes_on_from_an_item_that_is_incomplete(openai_client: OpenAI, continuation: str) -> None:
    """As vLLM's does: what was cut off and is sent back as it came, with nothing behind it, is not begun anew."""
    item: Any = {"type": "message", "role": "assistant", "id": "m", "status": "incomplete"}
    item["content"] = [{"type": "output_text", "text": "ship", "annotations": []}]
    said = openai_client.responses.create(model=NAME, input=[QUESTION, item], temperature=0, max_output_tokens=4)
    assert said.output_text == continuation


@pytest.mark.parametrize(
    ("fields", "goes_on"),
    [
        ({}, True),
        ({"status": "in_progress"}, True),
        ({"status": "completed"}, False),
        ({"role": "user"}, False),
        ({"content": ""}, False),
        ({"type": "reasoning"}, False),
    ],
)
def test_which_items_are_gone_on_with(fields: dict[str, Any], goes_on: bool) -> None:
    item = {"role": "assistant", "content": "ship", "status": "incomplete", **fields}
    for items, expected in (([QUESTION, item], goes_on), ([QUESTION, item, QUESTION], False)):
        chat = parse_body(ResponsesRequest, {"model": "m", "input": items}).as_chat()
        assert bool(chat.continue_final_message) is expected


@pytest.mark.parametrize(("copy", "open_thought"), [(thinking_copy, "<think>\n"), (harmony_copy, None)])
def test_an_answer_that_is_begun_is_not_thought_about_again(
    copy: Callable[[Path, Path], Path], open_thought: str | None, tmp_path: Path
) -> None:
    """With a budget, or held to a form, a model that thinks would begin to do so within what it says."""
    reader = RequestReader(CHAT, LivePrompts(copy(MODEL, tmp_path / "thinker")), "key")

    def thinks(content: str, **fields: Any) -> bool:
        messages = [QUESTION, {"role": "assistant", "content": content}]
        body = {"model": "m", "messages": messages, "include_reasoning": True, "thinking_token_budget": 5, **fields}
        row = reader.row(0, BatchLine(1, "x", body))
        assert row.error is None
        assert row.sampling is not None
        return RowSampling.model_validate_json(row.sampling).sampling.reasoning

    for said in ("ship", "one two three four five six seven eight nine ten eleven twelve thirteen"):
        assert thinks(said)
        assert not thinks(said, **WITHIN)
    if open_thought is not None:
        assert thinks(open_thought, **WITHIN)


@pytest.mark.parametrize("content", [None, ""])
def test_a_last_message_without_a_text(openai_client: OpenAI, content: str | None) -> None:
    silent: Any = {"role": "assistant", "content": content}
    with pytest.raises(BadRequestError, match="needs a last message whose content is a text") as refused:
        openai_client.chat.completions.create(messages=[QUESTION, silent], **OPTIONS, extra_body=WITHIN)
    assert refused.value.param == "continue_final_message"
