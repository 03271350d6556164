"""From a batch's lines to the rows of its job."""

from typing import Any

from headrace.engine.text.tokenizer import Tokenizer
from headrace.jobs.batches.lines import CHAT, BatchLine
from headrace.jobs.batches.requests import ModelLimits, RequestReader
from headrace.jobs.planning.rendering import PromptRenderer
from headrace.jobs.spec.schemas import JobSpec

from ..models import write_model_folder

TEMPLATE = (
    "{{ messages[0]['content'] }}{% if enable_thinking is defined and not enable_thinking %} d{% endif %}"
    "{% if reasoning_effort %} {{ reasoning_effort }}{% endif %}"
)


def test_what_a_line_has_the_chat_template_told(tmp_path):
    folder = write_model_folder(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    reader = RequestReader(CHAT, ModelLimits(context_length=100, vocab_size=10), "key")
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
