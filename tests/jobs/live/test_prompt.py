"""Prompts with images, on the producer's side."""

from base64 import b64encode

import pytest

from headrace.engine.vision.reading import ImageReader
from headrace.jobs.live.prompt import ContextLengthExceeded, LivePrompts

from ...engine.vision.seeing import picture, png

URL = f"data:image/png;base64,{b64encode(png(picture(200, 130))).decode()}"


def test_images_that_do_not_fit_are_refused_before_their_tokens_are_written(seeing, monkeypatch):
    """Some bytes may say that they are an image of thousands of tokens, and a body has room for many."""
    prompts = LivePrompts(seeing)
    part = {"type": "image_url", "image_url": {"url": URL}}
    asked = [[{"role": "user", "content": [part] * number}] for number in (2, 15)]
    assert len(prompts.chat(asked[0]).token_ids) > 2 * 35
    monkeypatch.delattr(ImageReader, "expanded")
    with pytest.raises(ContextLengthExceeded, match=r"maximum context length is 512 tokens.* has 571"):
        prompts.chat(asked[1])
