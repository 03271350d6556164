"""Attention to latents, as DeepSeek's models and GLM-4.7-Flash have it: how they are read, and what goes with them."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace import LoRARequest
from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.checkpoints.model_shape import LatentAttentionConfig, QueryGrowth
from headrace.engine.checkpoints.model_size import kv_token_bytes
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.errors import ModelError
from headrace.engine.kv_cache.kv_memory import KVMemory
from headrace.engine.request import Request
from headrace.kernels.native import native_library

from ..families import ODD_SIZES
from ..lora.adapters import save_adapter
from ..running import greedy_params, run_all, token_ids

# DeepSeek-V2-Lite's, but for what says how large it is.
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "eos_token_id": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 37,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_experts_per_tok": 6,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "v_head_dim": 128,
}
# Kimi K2's.
KIMI: dict[str, Any] = {
    **V2_LITE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "kimi_k2",
    "q_lora_rank": 1536,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 1,
    "rope_scaling": {**V2_LITE["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0, "factor": 32.0},
    "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
# Mistral Small 4's.
MISTRAL4: dict[str, Any] = {
    "architectures": ["Mistral4ForCausalLM"],
    "model_type": "mistral4",
    "eos_token_id": 2,
    "first_k_dense_replace": 0,
    "kv_lora_rank": 256,
    "moe_intermediate_size": 37,
    "n_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 4,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "rope_interleave": True,
    "rope_parameters": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 128.0,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 8192,
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000.0,
        "type": "yarn",
    },
    "routed_scaling_factor": 1.0,
    "topk_group": 1,
    "v_head_dim": 128,
}


def read(folder: Path, published: dict[str, Any], **fields: Any) -> ModelConfig:
    sizes = {name: size for name, size in ODD_SIZES.items() if name != "initializer_range"}
    (folder / "config.json").write_text(json.dumps({**sizes, **published, **fields}))
    return ModelConfig.from_pretrained(folder)


def test_deepseek_v2_lite_as_it_is_published(tmp_path):
    config = read(tmp_path, V2_LITE)
    assert config.latent_attention == LatentAttentionConfig(512, None, 128, 64, 128)
    assert (config.num_kv_rows, config.num_key_value_heads, config.head_dim, config.value_dim) == (1, 1, 576, 512)
    # What stretches it stretches sines and cosines by nothing, and scores by 0.0707 ln 40 + 1, twice.
    assert config.ropes[0].attention_factor == 1.0
    assert config.attention_scale == pytest.approx(192**-0.5 * 1.26080**2, rel=1e-5)
    assert config.max_position_embeddings == 163840
    assert config.moe is not None
    assert (config.moe.has_correction, config.moe.norm_topk_prob, config.moe.num_groups) == (False, False, 1)
    assert (config.moe.sparse_layers, config.moe.shared_expert_intermediate_size) == ((False, True, True), 74)
    assert kv_token_bytes(config, 2) == 3 * 576 * 2


def test_kimi_k2_as_it_is_published(tmp_path):
    config = read(tmp_path, KIMI)
    assert config.latent_attention == LatentAttentionConfig(512, 1536, 128, 64, 128)
    assert config.unread_parts == ("model.layers.3.",)
    assert config.moe is not None
    assert (config.moe.has_correction, config.moe.norm_topk_prob, config.moe.num_groups) == (True, True, 1)


def test_mistral_small_4_as_it_is_published(tmp_path):
    config = read(tmp_path, MISTRAL4)
    assert config.latent_attention == LatentAttentionConfig(256, 1024, 64, 64, 128)
    assert (config.rotary_dim, config.has_rotary_pairs, config.max_position_embeddings) == (64, True, 2**20)
    assert config.attention_scale == pytest.approx(128**-0.5 * 1.48520**2, rel=1e-5)
    assert config.query_growth == QueryGrowth(0.1, 8192)
    assert config.moe is not None
    assert (config.moe.has_correction, config.moe.norm_topk_prob, config.moe.has_wide_router) == (False, True, False)
    assert (config.moe.sparse_layers, config.moe.shared_expert_intermediate_size) == ((True,) * 3, 37)


def test_layers_that_have_experts(tmp_path):
    def sparse(published: dict[str, Any], **fields: Any) -> tuple[bool, ...]:
        moe = read(tmp_path, published, num_hidden_layers=5, **fields).moe
        assert moe is not None
        return moe.sparse_layers

    glm = {**KIMI, "architectures": ["Glm4MoeLiteForCausalLM"]}
    assert sparse(V2_LITE, moe_layer_freq=2) == (False, False, True, False, True)
    assert sparse(glm) == (False, True, True, True, True)
    assert sparse(glm, mlp_layer_types=["sparse", "dense", "sparse", "sparse", "dense"]) == (
        *(True, False, True),
        *(True, False),
    )
    assert read(tmp_path, V2_LITE, n_routed_experts=None).moe is None


@pytest.mark.parametrize(
    ("published", "fields", "message"),
    [
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob is True; supported: False"),
        (V2_LITE, {"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; supported: softmax"),
        (V2_LITE, {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; supported: greedy, group_"),
        (V2_LITE, {"kv_lora_rank": 0}, "kv_lora_rank must be at least 1, not 0"),
        (V2_LITE, {"qk_rope_head_dim": 7}, "qk_rope_head_dim 7 is odd"),
        (V2_LITE, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (KIMI, {"scoring_func": "softmax"}, "scoring_func is 'softmax'; supported: sigmoid"),
        (KIMI, {"topk_method": "greedy"}, "topk_method is 'greedy'; supported: noaux_tc"),
        (KIMI, {"partial_rotary_factor": 0.5}, "partial_rotary_factor is set"),
        (MISTRAL4, {"rope_parameters": None}, "rope_parameters is missing"),
        (MISTRAL4, {"qk_rope_head_dim": 32}, "partial_rotary_factor is not what of a head qk_rope_head_dim is"),
        (MISTRAL4, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (MISTRAL4, {"n_group": 4, "topk_group": 1}, "num_experts_per_tok is 4 of 2 experts: topk_group 1"),
        (KIMI, {"n_group": 3}, "n_group 3 must divide the 8 experts"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, published, fields, message):
    with pytest.raises(ModelError, match=message):
        read(tmp_path, published, **fields)


def test_the_cache_has_latents_alone(checkpoint):
    made = checkpoint("deepseek-v3")
    config = ModelConfig.from_pretrained(made.folder)
    memory = KVMemory(config, 4, 8, torch.bfloat16, torch.device("cpu"))
    [cache] = memory.caches
    assert cache.shape == (1, 3, 5, 8, 1, 26 + 6)
    assert memory.block_bytes == 8 * 3 * 32 * 2 == cache[:, :, 1].numel() * 2
    # Copied, moved out and back as whole rows.
    cache[:, :, 1] = torch.randn(3, 8, 1, 32).bfloat16()
    content = cache[:, :, 1].clone()
    memory.copy([(1, 2)])
    memory.swap_in(memory.swap_out([2, 1]), 1, [4])
    memory.zero([2])
    assert torch.equal(cache[:, :, 4], content)
    assert not cache[:, :, 2].any()


def answer(folder: Path, prompt: list[int], **options: Any) -> list[int]:
    engine = Engine.from_pretrained(folder, EngineConfig(num_gpu_blocks_override=40, max_model_len=150, **options))
    return token_ids(run_all(engine, [Request("r", prompt, greedy_params(20))])["r"])


def test_layers_that_guess_ahead_are_left_out(checkpoint, tmp_path):
    made = checkpoint("deepseek-v3")
    folder = Path(copytree(made.folder, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.3.eh_proj.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    assert answer(folder, made.prompts[1]) == made.expected[1][:20]


@pytest.mark.skipif(native_library() is None, reason="needs the compiled kernels")
def test_in_int8_what_makes_keys_and_values_stays_as_it_was(checkpoint):
    """It is multiplied by in two parts. The answers are not those of float32, and begin as they do."""
    made = checkpoint("glm4-moe-lite")
    engine = Engine.from_pretrained(
        made.folder, EngineConfig(quantization="int8", num_gpu_blocks_override=40, max_model_len=150)
    )
    runner: Any = engine._runner
    attention = runner._model._layers[0].attention
    assert attention.expand.packed.dtype == torch.float32
    assert attention.query.packed is None
    events = run_all(engine, [Request("r", made.prompts[1], greedy_params(20))])["r"]
    assert len(token_ids(events)) == 20


def test_adapters_for_what_makes_keys_and_values_are_refused(checkpoint, tmp_path):
    made = checkpoint("deepseek-v3")
    adapter = save_adapter(made.folder, tmp_path, targets=("q_b_proj", "kv_b_proj"))
    options = EngineConfig(enable_lora=True, lora_modules=[LoRARequest("x", 1, str(adapter))])
    with pytest.raises(ModelError, match=r"kv_b_proj\.lora_A\.weight, which this model cannot be adapted by"):
        Engine.from_pretrained(made.folder, replace(options, num_gpu_blocks_override=40, max_model_len=150))
