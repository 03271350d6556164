"""From a batch's lines to the rows of its job."""

import json
from typing import Any

from headrace.engine.text.tokenizer import Tokenizer
from headrace.jobs.batches.lines import CHAT, COMPLETIONS, BatchLine
from headrace.jobs.batches.requests import REQUEST_ERROR, RequestReader
from headrace.jobs.live.prompt import LivePrompts
from headrace.jobs.planning.rendering import PromptRenderer
from headrace.jobs.spec.schemas import JobSpec

from ...engine.fakes import CONTEXT
from ...engine.thinking import thinking_copy
from ..models import write_model_folder
from ..running import MODEL

TEMPLATE = (
    "{{ messages[0]['content'] }}{% if enable_thinking is defined and not enable_thinking %} d{% endif %}"
    "{% if reasoning_effort %} {{ reasoning_effort }}{% endif %}"
)


def test_what_a_line_has_the_chat_template_told(tmp_path):
    folder = write_model_folder(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    reader = RequestReader(CHAT, LivePrompts(folder), "key")
    renderer = PromptRenderer(JobSpec.parse(model="m", endpoint=CHAT), Tokenizer.from_pretrained(folder), ["messages"])
    prompts = []
    told: dict[str, Any]
    for told in (
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"chat_template_kwargs": {}},
        {},
        {"reasoning_effort": "none"},
        {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
        {"reasoning_effort": "high"},
    ):
        body = {"model": "m", "messages": [{"role": "user", "content": "a"}], **told}
        row = reader.row(0, BatchLine(1, "x", body))
        assert row.error is None
        prompts.append(renderer.render(row.values))
    assert prompts == ["a d", "a", "a", "a d none", "a none", "a high"]


def test_where_the_prompt_of_a_line_ends(tmp_path):
    folder = write_model_folder(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}[{{ message.content }}]{% endfor %}{% if add_generation_prompt %}({% endif %}"
    )
    reader = RequestReader(CHAT, LivePrompts(folder), "key")
    renderer = PromptRenderer(JobSpec.parse(model="m", endpoint=CHAT), Tokenizer.from_pretrained(folder), ["messages"])
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b "}]}
    within = {"continue_final_message": True, "add_generation_prompt": False}
    rows = [reader.row(0, BatchLine(1, "x", body | told)) for told in ({}, {"add_generation_prompt": False}, within)]
    assert [renderer.render(row.values) for row in rows] == ["[a][b ](", "[a][b ]", "[a][b "]
    # Of other jobs it is a column as any.
    jobs = PromptRenderer(JobSpec.parse(model="m"), Tokenizer.from_pretrained(folder), ["messages"])
    assert jobs.render(rows[2].values) == "[a][b ]("
    silent = {"messages": [{"role": "assistant", "tool_calls": []}]}
    row = reader.row(0, BatchLine(1, "x", body | within | silent))
    assert row.values[REQUEST_ERROR]["param"] == "continue_final_message"


def test_what_cannot_be_beside_the_thinking_is_named(tmp_path):
    reader = RequestReader(CHAT, LivePrompts(thinking_copy(MODEL, tmp_path / "thinker")), "key")
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "allowed_token_ids": [5]}
    assert reader.row(0, BatchLine(1, "x", body)).error is None
    row = reader.row(0, BatchLine(1, "x", body | {"include_reasoning": True}))
    assert row.values[REQUEST_ERROR]["param"] == "allowed_token_ids"
    assert "would bind the reasoning too" in (row.error or "")


def test_without_a_limit_an_answer_is_as_long_as_a_live_one(tmp_path):
    """Of a text to be continued that is OpenAI's 16 tokens."""
    prompts = LivePrompts(write_model_folder(tmp_path / "model", chat=True))

    def limit(endpoint: str, **body: Any) -> int:
        row = RequestReader(endpoint, prompts, "key").row(0, BatchLine(1, "x", {"model": "m", **body}))
        assert row.error is None
        return int(json.loads(row.sampling or "")["sampling"]["max_tokens"])

    assert limit(COMPLETIONS, prompt="a") == 16
    assert limit(COMPLETIONS, prompt="a", max_tokens=20) == 20
    assert limit(CHAT, messages=[{"role": "user", "content": "a"}]) == CONTEXT
