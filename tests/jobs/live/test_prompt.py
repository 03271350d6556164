"""Prompts on the producer's side: those that are too long, and those with images."""

import math
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.errors import InvalidRequestError
from headrace.engine.vision import reading
from headrace.jobs.live.asking import new_request
from headrace.jobs.live.prompt import ContextLengthExceeded, LivePrompts
from headrace.jobs.spec.sampling import SamplingSpec

from ...engine.vision.seeing import picture, png
from ..models import write_model_folder
from ..running import MODEL

URL = f"data:image/png;base64,{b64encode(png(picture(200, 130))).decode()}"


def test_images_that_do_not_fit_are_refused_before_their_tokens_are_written(seeing, monkeypatch):
    """Some bytes may say that they are an image of thousands of tokens, and a body has room for many."""
    prompts = LivePrompts(seeing)
    part = {"type": "image_url", "image_url": {"url": URL}}
    asked = [[{"role": "user", "content": [part] * number}] for number in (2, 15)]
    assert len(prompts.chat(asked[0]).token_ids) > 2 * 35
    monkeypatch.delattr(reading, "_places")
    with pytest.raises(ContextLengthExceeded, match=r"maximum context length is 512 tokens.* has 571"):
        prompts.chat(asked[1])


@pytest.mark.parametrize("prompt", [5, None, math.nan])
def test_what_is_neither_a_text_nor_a_chat_is_refused(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^prompt must be a text or a list of messages, not {prompt}$"):
        new_request(prompt, MODEL)


def test_a_template_that_leaves_no_token_of_a_chat(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model", chat=True)
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with pytest.raises(InvalidRequestError, match=r"^messages must not be empty$"):
        LivePrompts(folder).chat([{"role": "user", "content": ""}])


@pytest.mark.parametrize("field", ["messages", "prompt"])
def test_a_text_that_is_too_long_however_it_is_tokenized_is_not(field: str) -> None:
    """It takes seconds a megabyte."""
    prompts = LivePrompts(MODEL)
    context = prompts.context_length

    def ask(text: str) -> None:
        if field == "prompt":
            prompts.check(prompts.text(text), SamplingSpec(), field)
        else:
            prompts.check(prompts.chat([{"role": "user", "content": text}]).token_ids, SamplingSpec(), field)

    told = f"this model's maximum context length is {context} tokens, one of them generated, and the prompt has"
    with pytest.raises(ContextLengthExceeded, match=rf"^{told} at least \d+ tokens: shorten it$") as refused:
        ask("parcel " * context * 20)
    assert refused.value.field == field
    # Of one that may be short enough it is known only then.
    with pytest.raises(ContextLengthExceeded, match=rf"^{told} \d+ tokens: shorten it$"):
        ask("parcel " * context)
