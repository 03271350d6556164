"""Prompts with images on the CUDA path: prefill as it comes, decodes with graphs, and memory for the largest image."""

from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("triton", reason="the simulated GPU interprets Triton's kernels")

from headrace.engine.execution import memory_budget
from headrace.engine.llm import LLM, Prompt
from headrace.engine.request import SamplingParams
from headrace.engine.vision.tower import VisionTower

from ..execution.simulated_gpu import simulated_gpu
from .seeing import IMAGE, VISION_END, VISION_START, picture

PLACE = f"{VISION_START}{IMAGE}{VISION_END}"
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 8,
    "max_model_len": 24,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
}
PROMPTS: list[Prompt] = [
    {"prompt": f"A{PLACE}?", "multi_modal_data": {"image": picture(56, 84)}},
    {"prompt": "C."},
]
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


def test_answers_are_the_cpus(oracle, monkeypatch):
    def generated(llm: LLM) -> list[tuple[int, ...]]:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]

    expected = generated(LLM(oracle.folder, **OPTIONS, num_gpu_blocks_override=30, device="cpu"))
    sizes, encode = [], VisionTower.encode

    def noted(self: VisionTower, pixels: Tensor) -> Tensor:
        sizes.append(pixels.shape[:2])
        return encode(self, pixels)

    monkeypatch.setattr(VisionTower, "encode", noted)
    monkeypatch.setattr(memory_budget, "_GRAPH_BYTES_PER_LAYER", 0)
    with simulated_gpu(monkeypatch, total_bytes=16 * 2**20) as gpu:
        llm = LLM(oracle.folder, **OPTIONS, device="cuda", cuda_graph_sizes=(2,), gpu_memory_utilization=0.5)
        # What is left for KV was measured with the largest image that a prompt has room for.
        assert sizes == [(4 * 28, 4 * 28)]
        assert generated(llm) == expected
        assert gpu.memory.used <= gpu.memory.total // 2
