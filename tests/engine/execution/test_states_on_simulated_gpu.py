"""Layers with recurrent states on a GPU: decodes are CUDA graphs, and go on from the states that are theirs."""

from pathlib import Path
from shutil import copytree

import pytest
from transformers import FalconH1Config, Lfm2Config, Qwen3_5TextConfig

pytest.importorskip("triton", reason="the simulated GPU interprets Triton's kernels")

from headrace import LLM, SamplingParams
from headrace.engine.execution.cuda_graphs import CudaGraphs
from headrace.engine.execution.model_runner import ModelRunner

from ..conftest import save_random_model
from .simulated_gpu import simulated_gpu
from .test_on_simulated_gpu import OPTIONS, SIZES

GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.0, seed=3, max_tokens=5, ignore_eos=True, n=3)
# Samples begin from one state, which one of them keeps; sequences end at different times, so that sizes change.
PROMPTS = {"a rather long one": GREEDY, "b": SamplingParams(temperature=0, max_tokens=3), "a rather long two": DRAWN}


_SIZES = SIZES | {"num_hidden_layers": 2, "head_dim": 16}
CONFIGS = {
    "delta": lambda: Qwen3_5TextConfig(
        **_SIZES,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
    "beside attention": lambda: FalconH1Config(
        **_SIZES,
        mamba_d_ssm=32,
        mamba_n_heads=2,
        mamba_d_state=16,
        key_multiplier=0.5,
        ssm_multipliers=[0.5, 0.8, 0.7, 0.9, 0.6],
        mlp_multipliers=[0.7, 0.9],
    ),
    "convolution": lambda: Lfm2Config(**_SIZES, layer_types=["conv", "full_attention"]),
}


@pytest.fixture(scope="module", params=["delta"])
def folder(request: pytest.FixtureRequest, chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Path(copytree(chat_folder, tmp_path_factory.mktemp("states") / "model"))
    save_random_model(CONFIGS[request.param](), made)
    return made


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(list(PROMPTS), list(PROMPTS.values()))
    llm.engine.check()
    return [list(sample.token_ids) for output in outputs for sample in output.outputs]


@pytest.mark.parametrize(
    ("folder", "is_async"),
    [("beside attention", False), ("delta", True), ("convolution", True)],
    ids=["beside keys and values, one step at a time", "one step ahead", "nothing but convolutions"],
    indirect=["folder"],
)
def test_answers_are_the_cpus(folder, is_async, monkeypatch):
    expected = answers(LLM(folder, **OPTIONS, device="cpu"))
    eager: list[int] = []
    compute_eagerly = CudaGraphs._compute_eagerly

    def noted(self, batch):
        eager.append(max(batch.attention.query_lens))
        return compute_eagerly(self, batch)

    monkeypatch.setattr(CudaGraphs, "_compute_eagerly", noted)
    with simulated_gpu(monkeypatch):
        llm = LLM(folder, **OPTIONS, device="cuda", cuda_graph_sizes=(2, 6), async_scheduling=is_async)
        # The second time prompts go on from states that were kept.
        assert [answers(llm), answers(llm)] == [expected, expected]
        runner = llm.engine._runner
        assert isinstance(runner, ModelRunner)
        assert runner.num_captures > 2
        assert min(eager) > 1


def test_a_prompt_takes_no_more_memory_than_was_measured(folder, monkeypatch):
    """Layers with a state take many tokens of one sequence by chunks, for which they need memory."""
    options = OPTIONS | {"dtype": "float16", "num_gpu_blocks_override": None, "max_num_batched_tokens": 48}
    with simulated_gpu(monkeypatch, total_bytes=4 * 2**20) as gpu:
        llm = LLM(folder, **options, device="cuda", enforce_eager=True, gpu_memory_utilization=0.9)
        gpu.memory.reset_peak()
        llm.generate(["as long as a step " * 2], SamplingParams(max_tokens=1))
        assert gpu.memory.max_reserved <= 0.9 * gpu.memory.total
