"""Prompts with images on the CUDA path: prefill as it comes, decodes with graphs, and memory for the largest image.

With what images add to the first layers: graphs never meet it, since they are for steps without an image's token.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the simulated GPU interprets Triton's kernels")

from headrace.engine.config import EngineConfig
from headrace.engine.execution import memory_budget
from headrace.engine.execution.largest_step import LargestStep
from headrace.engine.llm import LLM, Prompt
from headrace.engine.models import load_model
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.vision.image_files import scale
from headrace.engine.vision.tower import VisionTower

from ..execution.simulated_gpu import simulated_gpu
from .seeing import IMAGE, VISION_END, VISION_START, picture, save_gemma3

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


def test_answers_are_the_cpus(qwen3, monkeypatch):
    def generated(llm: LLM) -> list[tuple[int, ...]]:
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY)]

    expected = generated(LLM(qwen3.folder, **OPTIONS, num_gpu_blocks_override=30, device="cpu"))
    sizes, encode = [], VisionTower.encode

    def noted(self: VisionTower, pixels: Tensor) -> Tensor:
        sizes.append(pixels.shape[:2])
        return encode(self, pixels)

    monkeypatch.setattr(VisionTower, "encode", noted)
    monkeypatch.setattr(memory_budget, "_GRAPH_BYTES_PER_LAYER", 0)
    with simulated_gpu(monkeypatch, total_bytes=16 * 2**20) as gpu:
        llm = LLM(qwen3.folder, **OPTIONS, device="cuda", cuda_graph_sizes=(2,), gpu_memory_utilization=0.5)
        # What is left for KV was measured with the largest image that a prompt has room for.
        assert sizes == [(4 * 32, 4 * 32)]
        assert generated(llm) == expected
        assert gpu.memory.used <= gpu.memory.total // 2


def test_whose_tokens_see_all_of_an_image(tmp_path, monkeypatch):
    """Whatever a step may have, it has all of an image, and memory for that."""
    save_gemma3(tmp_path, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    prompts: list[Prompt] = [
        {"prompt": "A<start_of_image>?", "multi_modal_data": {"image": picture(56, 84)}},
        {"prompt": "C."},
    ]
    options = {**OPTIONS, "max_model_len": 32, "cuda_graph_sizes": (2,)}

    def generated(llm: LLM) -> list[tuple[int, ...]]:
        return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]

    expected = generated(LLM(tmp_path, **options, num_gpu_blocks_override=30, device="cpu"))
    measured, forward = [], LargestStep.forward

    def noted(self: LargestStep, *given: Any) -> Tensor:
        measured.append((len(self.token_ids), [(span.length, span.end) for span in self.attention.spans]))
        return forward(self, *given)

    monkeypatch.setattr(LargestStep, "forward", noted)
    monkeypatch.setattr(memory_budget, "_GRAPH_BYTES_PER_LAYER", 0)
    with simulated_gpu(monkeypatch, total_bytes=16 * 2**20):
        llm = LLM(tmp_path, **options, device="cuda", gpu_memory_utilization=0.5)
        assert measured == [(8 + 16 - 1, []), (8 + 16 - 1, [(16, 32)])]
        assert generated(llm) == expected


@torch.inference_mode()
def test_a_tower_with_windows_sees_the_same(oracle, monkeypatch):
    pixels = torch.from_numpy(scale(picture(140, 90), oracle.vision))
    with simulated_gpu(monkeypatch):
        model = load_model(oracle.config, EngineConfig(), torch.float32, torch.device("cuda"))
        assert model.vision is not None
        seen = model.vision.encode(pixels).cpu()
    torch.testing.assert_close(seen[0], oracle.features(picture(140, 90))[0], atol=1e-4, rtol=1e-4)
