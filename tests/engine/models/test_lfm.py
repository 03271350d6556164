"""How the configs of LFM2 and LFM3 are read; `test_layers_with_states.py` has what they answer."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Lfm3Config

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.checkpoints.model_size import num_parameters, state_bytes
from headrace.engine.checkpoints.rope_config import RopeConfig
from headrace.engine.errors import ModelError

# As it is published; other fields are for training alone.
LFM2_1_2B: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 256,
    "conv_L_cache": 3,
    "conv_bias": False,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "max_position_embeddings": 128000,
    "norm_eps": 1e-5,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rope_theta": 1e6,
    "torch_dtype": "bfloat16",
    "vocab_size": 65536,
}
MOE = {"architectures": ["Lfm2MoeForCausalLM"], "intermediate_size": 7168, "moe_intermediate_size": 1792}
LFM3 = {name: size for name, size in LFM2_1_2B.items() if name not in ("full_attn_idxs", "conv_L_cache", "rope_theta")}
LFM3 |= {"architectures": ["Lfm3ForCausalLM"], "intermediate_size": 7680, "num_attention_heads": 16}


def read(folder: Path, **fields: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(LFM2_1_2B | fields))
    return ModelConfig.from_pretrained(folder)


def test_lfm2_as_it_is_published(tmp_path):
    config = read(tmp_path)
    assert (config.intermediate_size, config.tie_word_embeddings, config.eos_token_ids) == (8192, True, (7,))
    assert (num_parameters(config), state_bytes(config, 2)) == (1_170_340_608, 10 * 2 * 2048 * 2)
    assert config.kv_places.count(None) == 10
    assert read(tmp_path, block_auto_adjust_ff_dim=False, tie_embedding=False).intermediate_size == 12288
    # Two thirds, times the factor, both rounded down, then up to a multiple: 8191, 10648, 10752.
    assert read(tmp_path, block_ff_dim=12287, block_ffn_dim_multiplier=1.3).intermediate_size == 10752


def test_lfm2_of_which_all_layers_attend(tmp_path):
    assert read(tmp_path, full_attn_idxs=None).state_layers is None


def test_lfm2_moe_as_it_is_published(tmp_path):
    kinds = ["full_attention" if layer in (2, 6, 10, 14, 18, 21) else "conv" for layer in range(24)]
    config = read(tmp_path, **MOE, num_hidden_layers=24, layer_types=kinds, num_experts=32, num_experts_per_tok=4)
    assert config.moe is not None
    assert config.moe.sparse_layers == (False, False) + (True,) * 22
    # A number more for each expert, which transformers does not count.
    assert num_parameters(config) == 8_339_929_856 + 22 * 32


def test_what_lfm3_leaves_out_is_what_transformers_takes_it_for(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LFM3 | {"num_hidden_layers": 24, "num_key_value_heads": 4}))
    bare = ModelConfig.from_pretrained(tmp_path)
    assert bare.ropes[2] == RopeConfig(1e6, "proportional", turning_share=0.5)
    saved = Lfm3Config(vocab_size=65536, eos_token_id=7, dtype="bfloat16").to_dict()
    (tmp_path / "config.json").write_text(json.dumps(saved | {"architectures": ["Lfm3ForCausalLM"]}))
    assert ModelConfig.from_pretrained(tmp_path) == bare


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"full_attn_idxs": []}, "no layer attends, as layer_types, .* says: supported are models of which some"),
        ({"layer_types": ["conv", "mamba"] * 8}, "layer_types has mamba; supported: conv, full_attention"),
        ({"conv_L_cache": 1}, "conv_L_cache must be at least 2, not 1"),
        ({**MOE, "use_expert_bias": False}, "use_expert_bias is false: mixtures are supported that correct who"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, fields, message):
    with pytest.raises(ModelError, match=message):
        read(tmp_path, **fields)
