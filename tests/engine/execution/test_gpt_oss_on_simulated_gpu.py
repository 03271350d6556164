"""Attention sinks reach the GPU's kernels, where prefixes are shared and where a window hides them."""

from pathlib import Path

import pytest
from transformers import GptOssConfig

pytest.importorskip("triton", reason="the simulated GPU interprets Triton's kernels")

from headrace import LLM, SamplingParams
from headrace.kernels.paged_attention import planning

from ..conftest import save_random_model
from .simulated_gpu import simulated_gpu
from .test_on_simulated_gpu import OPTIONS, SIZES, assert_equal, generate

GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2)
WANTED = [(text, GREEDY) for text in ("a rather long", "a rather slow", "b", "cd")]


def save(folder: Path) -> None:
    sizes = {**SIZES, "num_hidden_layers": 2, "head_dim": 16}
    config = GptOssConfig(**sizes, num_local_experts=4, num_experts_per_tok=2, sliding_window=7)
    save_random_model(config, folder)


def test_answers_are_the_cpus(chat_folder, tmp_path, monkeypatch):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((chat_folder / name).read_bytes())
    save(tmp_path)
    expected = generate(LLM(tmp_path, **OPTIONS, device="cpu"), WANTED)
    monkeypatch.setattr(planning, "MIN_SHARED_TOKENS", ((2, 8),))
    with simulated_gpu(monkeypatch, False):
        assert_equal(generate(LLM(tmp_path, **OPTIONS, device="cuda"), WANTED), expected)
