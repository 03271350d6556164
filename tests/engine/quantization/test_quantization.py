"""A model in int8: close to what it was, and refused where it would be slow."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace import LLM, SamplingParams
from headrace.engine.errors import ConfigError
from headrace.kernels.native import native_library

from ..conftest import Checkpoint

MODEL = Path(__file__).parents[3] / "examples" / "tickets" / "model"

needs_kernels = pytest.mark.skipif(native_library() is None, reason="needs the compiled kernels")


@needs_kernels
@pytest.mark.parametrize("family", ["llama", "llama-bias-tied-rope3", "qwen2-yarn", "lfm3"])
def test_logprobs_are_near_those_of_the_checkpoint(checkpoint: Callable[[str], Checkpoint], family: str):
    made = checkpoint(family)
    plain, rounded = (logprobs(made, quantization=quantization) for quantization in (None, "int8"))
    error = (plain - rounded).std() / plain.std()
    assert 0 < error < 0.15


def logprobs(made: Checkpoint, **options: Any) -> torch.Tensor:
    """Of every token that the prompts have."""
    llm = LLM(made.folder, skip_tokenizer_init=True, dtype="float32", num_gpu_blocks_override=64, **options)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in made.prompts], params)
    found = [
        each[token].logprob
        for output, prompt in zip(outputs, made.prompts, strict=True)
        for each, token in zip(output.prompt_logprobs or [], prompt, strict=True)
        if each is not None
    ]
    return torch.tensor(found)


def test_is_refused_where_the_kernels_are_not():
    code = f"from headrace import LLM; LLM({str(MODEL)!r}, quantization='int8')"
    environment = {**os.environ, "HEADRACE_NATIVE_KERNELS": "0"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert "ConfigError: quantization int8 needs the compiled kernels" in result.stderr


@needs_kernels
def test_a_dtype_without_int8_is_refused():
    with pytest.raises(ConfigError, match="here are cpu and float16"):
        LLM(MODEL, quantization="int8", dtype="float16")
