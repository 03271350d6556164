"""Mixtures of experts on a GPU, with CUDA graphs and without: answers are the CPU's, and the host waits for none."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from transformers import (
    Gemma4TextConfig,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    NemotronHConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

pytest.importorskip("triton", reason="the simulated GPU interprets Triton's kernels")

from headrace import LLM, SamplingParams
from headrace.engine.execution.model_runner import ModelRunner
from headrace.engine.models import moe
from headrace.engine.models.moe import Mixture

from ..conftest import save_random_model
from .simulated_gpu import simulated_gpu
from .test_on_simulated_gpu import OPTIONS, SIZES

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPTS = ["a rather long one", "a rather slow", "b", "cd"]
MODELS: dict[str, PretrainedConfig] = {
    "mixtral": MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=2),
    # With an expert for all, and a layer without any.
    "qwen": Qwen2MoeConfig(
        **SIZES | {"num_hidden_layers": 2},
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=20,
        mlp_only_layers=[1],
    ),
    "glm": Glm4MoeConfig(
        **SIZES | {"num_hidden_layers": 2},
        n_routed_experts=6,
        num_experts_per_tok=3,
        n_group=3,
        topk_group=2,
        moe_intermediate_size=24,
        routed_scaling_factor=1.5,
    ),
    # Beside an MLP.
    "gemma4": Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 2},
        head_dim=16,
        global_head_dim=24,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=24,
        tie_word_embeddings=False,
    ),
    "gpt-oss": GptOssConfig(
        **SIZES | {"num_hidden_layers": 2, "head_dim": 16},
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=7,
        swiglu_limit=1.0,
    ),
    # Experts without gates, beside layers with Mamba-2's states.
    "nemotron": NemotronHConfig(
        **{name: size for name, size in SIZES.items() if name != "num_hidden_layers"},
        head_dim=16,
        layers_block_type=["mamba", "moe", "attention"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        n_routed_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        moe_shared_expert_intermediate_size=20,
        time_step_min=1e-30,
    ),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gpu") / "model"
    copytree(chat_folder, made)
    save_random_model(MODELS[request.param], made)
    return made


def runner(llm: LLM) -> ModelRunner:
    found = llm.engine._runner
    assert isinstance(found, ModelRunner)
    return found


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS)
    llm.engine.check()
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return answers(LLM(folder, **OPTIONS, device="cpu"))


def test_answers_are_the_cpus(folder, expected, monkeypatch):
    """Steps with prompts run eagerly, decodes as graphs."""
    with simulated_gpu(monkeypatch):
        llm = LLM(folder, **OPTIONS, device="cuda", cuda_graph_sizes=(2, 6))
        assert answers(llm) == expected
        assert runner(llm).num_captures > 0


def test_nothing_but_a_steps_end_is_waited_for(folder, expected, monkeypatch):
    with simulated_gpu(monkeypatch) as gpu:
        llm = LLM(folder, **OPTIONS, device="cuda", enforce_eager=True)
        gpu.timeline.waits.clear()
        assert answers(llm) == expected
        assert gpu.timeline.waits == ["Event.synchronize"] * llm.engine.stats.num_steps


def test_experts_lie_side_by_side_on_a_gpu_alone(folder, monkeypatch):
    def mixtures(**options: Any) -> list[Mixture]:
        layers = runner(LLM(folder, **OPTIONS, **options))._model._layers
        return [layer.mixture for layer in layers if layer.mixture is not None]

    assert all(each.stacked is None for each in mixtures(device="cpu"))
    with simulated_gpu(monkeypatch):
        found = mixtures(device="cuda", enforce_eager=True)
    assert found
    assert all(each.stacked is not None for each in found)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("mixtral", GPTQ), ("mixtral", NVFP4), ("qwen", FP8), ("gemma4", FP8), ("gpt-oss", {"quant_method": "mxfp4"})],
    ids=["mixtral-gptq", "mixtral-nvfp4", "qwen-fp8", "gemma4-fp8", "gpt-oss-mxfp4"],
)
def test_quantised_experts_side_by_side_answer_as_those_called_one_by_one(
    name, quantization, chat_folder, tmp_path, monkeypatch
):
    copytree(chat_folder, tmp_path, dirs_exist_ok=True)
    config = MODELS[name].to_dict() | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[MODELS[name].model_type]]}
    sizes: dict[str, Any] = {name: 64 for name in config if name == "hidden_size" or name.endswith("intermediate_size")}
    # One layer, as each kernel is interpreted.
    sizes |= {"num_hidden_layers": 1, "layer_types": (config.get("layer_types") or [])[:1] or None}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes | {"quantization_config": quantization}))
    options = {**OPTIONS, "device": "cuda", "load_format": "dummy", "cuda_graph_sizes": (6,)}
    with simulated_gpu(monkeypatch):
        llm = LLM(tmp_path, **options)
        found = answers(llm)
        assert runner(llm).num_captures > 0
        monkeypatch.setattr(moe, "stack_experts", lambda *_: None)
        llm = LLM(tmp_path, **options)
        assert answers(llm) == found
        assert runner(llm).num_captures == 0
    assert len({token for answer in found for token in answer}) > 5
