"""What is peculiar to a family on a GPU, with CUDA graphs: answers are the CPU's."""

import json
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
from transformers import (
    Cohere2Config,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Gemma4TextConfig,
    GraniteMoeConfig,
    HunYuanDenseV1Config,
    LlamaConfig,
    NemotronConfig,
    OlmoeConfig,
    PretrainedConfig,
)

pytest.importorskip("triton", reason="the simulated GPU interprets Triton's kernels")

from headrace import LLM, SamplingParams
from headrace.engine.execution import memory_budget
from headrace.engine.models import norms as norms_module
from headrace.kernels.linear import Linear
from headrace.kernels.norm_rotary import add_rms_norm_quantized

from ..conftest import save_random_model
from ..state_families import STATE_MAKERS
from .simulated_gpu import simulated_gpu
from .test_on_simulated_gpu import OPTIONS, SIZES

LATENT_SIZES: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 2,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
}
MODELS: dict[str, PretrainedConfig] = {
    "parts side by side on a norm without a bias, pairs that are rotated": Cohere2Config(
        **SIZES | {"num_hidden_layers": 2},
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
        tie_word_embeddings=False,
    ),
    "heads of two sizes, keys that are values": Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2},
        head_dim=16,
        global_head_dim=24,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0,
        tie_word_embeddings=False,
    ),
    "keys of earlier layers, inputs of layers' own": Gemma4TextConfig(
        **SIZES | {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1},
        head_dim=16,
        global_head_dim=24,
        sliding_window=7,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=12,
        vocab_size_per_layer_input=SIZES["vocab_size"],
        tie_word_embeddings=False,
    ),
    "latents that are attended to, experts in groups": DeepseekV3Config(
        **LATENT_SIZES, q_lora_rank=20, n_routed_experts=6, num_experts_per_tok=2, n_group=3, topk_group=2
    ),
    "latents without one for queries, probabilities in groups": DeepseekV2Config(
        **LATENT_SIZES,
        q_lora_rank=None,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=3,
        topk_group=2,
        topk_method="group_limited_greedy",
    ),
    "norms with a bias, an MLP without a gate": NemotronConfig(**SIZES),
    "norms of heads that are rotated": HunYuanDenseV1Config(**SIZES, head_dim=16),
    "norms over all heads, experts": OlmoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2),
    "stacked experts": GraniteMoeConfig(**SIZES, num_local_experts=5, num_experts_per_tok=2),
    "probabilities that are corrected": Ernie4_5_MoeConfig(
        **SIZES,
        moe_num_experts=5,
        moe_k=2,
        moe_intermediate_size=24,
        moe_num_shared_experts=1,
        moe_layer_start_index=0,
        tie_word_embeddings=False,
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_answers_are_the_cpus(name, chat_folder, tmp_path, monkeypatch):
    folder = Path(copytree(chat_folder, tmp_path / "model"))
    save_random_model(MODELS[name], folder)
    prompts, params = ["a rather long one", "b"], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)

    def answers(**options: Any) -> list[list[int]]:
        outputs = LLM(folder, **OPTIONS, **options).generate(prompts, params)
        return [list(output.outputs[0].token_ids) for output in outputs]

    expected = answers(device="cpu")
    with simulated_gpu(monkeypatch):
        assert answers(device="cuda", cuda_graph_sizes=(2,)) == expected


LFM3_SIZES = {name: SIZES[name] for name in SIZES.keys() - {"bos_token_id", "eos_token_id"}} | {"num_hidden_layers": 3}
FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize(
    ("config", "norms"),
    [
        (LlamaConfig(**SIZES), 2),
        (MODELS["latents that are attended to, experts in groups"], 1),
        # Gates of heads read what attention reads.
        (STATE_MAKERS["lfm3"](LFM3_SIZES), 3),
    ],
    ids=["attention and MLP", "latents, experts", "gates of heads"],
)
def test_norms_give_products_of_bytes_what_they_would_make_themselves(
    config, norms, chat_folder, tmp_path, monkeypatch
):
    """`norms`: how many of a layer's do."""
    folder = Path(copytree(chat_folder, tmp_path / "model"))
    save_random_model(config, folder)
    read = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(read | {"quantization_config": FP8_BLOCKS}))
    prompts, params = ["a rather long one", "b"], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    calls: list[object] = []

    def counted(*given: Any) -> object:
        calls.append(given)
        return add_rms_norm_quantized(*given)

    def answers() -> list[list[int]]:
        llm = LLM(folder, **OPTIONS, device="cuda", load_format="dummy", enforce_eager=True)
        calls.clear()
        return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, params)]

    monkeypatch.setattr(norms_module, "add_rms_norm_quantized", counted)
    with simulated_gpu(monkeypatch):
        found = answers()
        # Of each of the steps: a prompt's first part, then both.
        assert len(calls) in (norms * 5, norms * 6)
        monkeypatch.setattr(Linear, "row_format", None)
        assert answers() == found
        assert not calls


def test_how_many_latents_there_is_memory_for_is_measured(chat_folder, tmp_path, monkeypatch):
    """A block takes a row a token and layer, so that there are more of them than keys and values would leave."""
    folder = Path(copytree(chat_folder, tmp_path / "model"))
    save_random_model(next(model for name, model in MODELS.items() if name.startswith("latents")), folder)
    options = {name: value for name, value in OPTIONS.items() if name != "num_gpu_blocks_override"}
    # What the driver takes for a graph is not simulated.
    monkeypatch.setattr(memory_budget, "_GRAPH_BYTES_PER_LAYER", 0)
    with simulated_gpu(monkeypatch, total_bytes=8 * 2**20, others=2**20) as gpu:
        llm, memory = LLM(folder, **options, device="cuda", gpu_memory_utilization=0.8), gpu.memory
        llm.generate(["a rather long one", "b"], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        runner: Any = llm.engine._runner
        assert runner.memory.block_bytes == 8 * SIZES["num_hidden_layers"] * (24 + 6) * 4
        assert runner.memory.num_blocks * runner.memory.block_bytes > 2**20
        assert 0.75 < (memory.others + memory.max_reserved) / memory.total < 0.81
