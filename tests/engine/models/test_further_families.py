"""How the configs of families whose layers are like those of others are read; `test_golden.py` has what they answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.checkpoints.model_shape import FalconH1Config
from headrace.engine.checkpoints.model_size import kv_token_bytes, num_parameters, state_bytes
from headrace.engine.checkpoints.rope_config import RopeConfig
from headrace.engine.checkpoints.state_layers import Mamba2Config
from headrace.engine.errors import ModelError

from ..families import ODD_SIZES

SIZES = {name: size for name, size in ODD_SIZES.items() if name != "initializer_range"} | {"eos_token_id": 1}
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 37}


def read(folder: Path, architecture: str, **fields: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps({**SIZES, "architectures": [architecture], **fields}))
    return ModelConfig.from_pretrained(folder)


def test_internlm_3_as_it_is_published_and_as_transformers_saves_it(tmp_path):
    """Its context is stretched beyond itself alone."""
    rope = {"rope_scaling": {"factor": 6.0, "rope_type": "dynamic"}, "rope_theta": 5e7}
    published = read(tmp_path, "InternLM3ForCausalLM", bias=False, qkv_bias=True, **rope)
    assert (published.qkv_bias, published.output_bias, published.mlp_bias) == (True, False, False)
    assert (published.ropes[0], published.max_position_embeddings) == (RopeConfig(5e7), 256)
    saved = read(tmp_path, "InternLM3ForCausalLM", mlp_bias=True, attention_bias=True, head_dim=8)
    assert (saved.qkv_bias, saved.output_bias, saved.mlp_bias, saved.head_dim) == (True, True, True, 8)


def test_command_r_as_it_is_published(tmp_path):
    """Its context stands beside what it was first trained for."""
    config = read(tmp_path, "CohereForCausalLM", model_max_length=131072, max_position_embeddings=8192, rope_theta=8e6)
    assert (config.max_position_embeddings, config.ropes[0]) == (131072, RopeConfig(8e6))
    assert (config.tie_word_embeddings, config.logits_scaling, config.has_rotary_pairs) == (True, 16.0, True)


def test_windows_and_positions_of_command_r7b_by_its_pattern(tmp_path):
    config = read(tmp_path, "Cohere2ForCausalLM", num_hidden_layers=5, sliding_window=32, sliding_window_pattern=4)
    assert config.sliding_windows == (32, 32, 32, None, 32)
    assert [rope.rope_type for rope in config.ropes] == ["default", "default", "default", "none", "default"]
    assert config.ropes[0].theta == 1e4


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("CohereForCausalLM", {"use_qk_norm": True}, "use_qk_norm is set: norms of queries and keys"),
        ("CohereForCausalLM", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: silu"),
        ("StableLmForCausalLM", {"qk_layernorm": True}, "qk_layernorm is set: norms of queries and keys"),
        ("ApertusForCausalLM", {"post_norm": True}, "post_norm is True; supported for Apertus: False"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, r"clip_qkv is 8\.0: .* cut off are not supported"),
        ("MiniMaxM2ForCausalLM", {"attn_type_list": [1, 0, 1]}, "attn_type_list has 0: linear attention"),
        ("MiniMaxM2ForCausalLM", {"shared_intermediate_size": 64}, "shared_intermediate_size is 64; supported .*: 0"),
        ("Ernie4_5_MoeForCausalLM", {"use_bias": True}, "use_bias is set: ERNIE's mixtures are supported without"),
        ("HunYuanDenseV1ForCausalLM", {"use_qk_norm": False}, "use_qk_norm is false: supported are models whose"),
        ("HunYuanMoEV1ForCausalLM", {"moe_topk": [2, 2, 4]}, r"moe_topk differs between layers, \[2, 4\]: supported"),
        ("HunYuanMoEV1ForCausalLM", {"moe_layer_num_skipped": 1}, "moe_layer_num_skipped is 1: supported are models"),
        ("HunYuanDenseV1ForCausalLM", {"use_cla": True}, "use_cla is set: layers that share keys and values"),
        (
            "GraniteMoeForCausalLM",
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config is set: Granite",
        ),
        (
            "GraniteMoeHybridForCausalLM",
            {"layer_types": ["mamba", "rwkv", "mamba"]},
            "layer_types has rwkv; supported: mamba, ",
        ),
        ("GraniteMoeHybridForCausalLM", {"layer_types": ["mamba"] * 9}, "layer_types has 9 entries for"),
        ("GraniteMoeHybridForCausalLM", {"mamba_n_heads": 7}, "mamba_n_heads 7 of mamba_d_head .* are not"),
        ("FalconH1ForCausalLM", {"projectors_bias": True}, "projectors_bias is set: Falcon-H1 is supported without"),
        ("FalconH1ForCausalLM", {"mamba_rms_norm": True}, "mamba_norm_before_gate is true, or left out: supported are"),
        ("FalconH1ForCausalLM", {"lm_head_multiplier": 0}, "lm_head_multiplier must be above 0, not 0"),
        ("FalconH1ForCausalLM", {"mamba_d_ssm": 96}, "mamba_n_heads 128 of mamba_d_head 0 are not the 96 numbers that"),
        ("FalconH1ForCausalLM", {"ssm_multipliers": [0.5, 0.5]}, "ssm_multipliers has 2 entries, and must have 5"),
        (
            "OlmoHybridForCausalLM",
            {"layer_types": ["mamba"] * 3},
            "layer_types has mamba; supported: linear_attention, ",
        ),
        (
            "OlmoHybridForCausalLM",
            {"linear_num_key_heads": 5},
            "value_heads 6 is no multiple of linear_num_key_heads 5",
        ),
        ("NemotronHForCausalLM", {}, "has no field 'hybrid_override_pattern'"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M-M"}, "no layer attends, .* hybrid_override_pattern"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*", "conv_kernel": 1}, "conv_kernel must be at least 2"),
        (
            "NemotronHForCausalLM",
            {"hybrid_override_pattern": "*E", "moe_intermediate_size": 0},
            "moe_intermediate_size must be at least 1, not 0",
        ),
        ("BambaForCausalLM", {"attn_layer_indices": [], "mamba_n_heads": 12}, "no layer attends, as .* attn_layer_in"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*W"}, "kinds W; supported: M, "),
        (
            "NemotronHForCausalLM",
            {"hybrid_override_pattern": "M*", "n_groups": 3},
            "mamba_num_heads 128 is no multiple",
        ),
        ("Exaone4ForCausalLM", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern is 'LLLG': layer_types has"),
        ("HYV3ForCausalLM", {"mlp_bias": True}, "mlp_bias is set: Hy3 is supported without"),
        ("HYV3ForCausalLM", {**MIXTURE, "mlp_layer_types": ["dense"]}, "mlp_layer_types has 1 entries for 3 layers"),
        ("ExaoneMoeForCausalLM", {**MIXTURE, "mlp_layer_types": ["moe"] * 3}, "has moe; supported: dense, sparse"),
        ("ExaoneMoeForCausalLM", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("MellumForCausalLM", {**MIXTURE, "layer_types": ["full_attention"]}, "layer_types has 1 entries for 3 layers"),
        ("GraniteSWAForCausalLM", {"layer_rope_theta": [0]}, "layer_rope_theta has 1 entries for 3 layers"),
        (
            "Cohere2MoeForCausalLM",
            {"expert_selection_fn": "topk"},
            "expert_selection_fn is 'topk'; supported: softmax",
        ),
        (
            "Cohere2MoeForCausalLM",
            {"shared_expert_combination_strategy": "gate"},
            "combination_strategy is 'gate'; supported: average, sum",
        ),
        ("NemotronForCausalLM", {"hidden_act": "silu"}, "hidden_act is 'silu'; supported: relu2"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, architecture, fields, message):
    with pytest.raises(ModelError, match=message):
        read(tmp_path, architecture, **fields)


def test_falcon_h1_as_it_is_published(tmp_path):
    """Its 7B: what scales its inputs scales what is made of them, and Mamba's size is not the hidden one's double."""
    config = read(
        tmp_path,
        "FalconH1ForCausalLM",
        hidden_size=3072,
        intermediate_size=12288,
        num_hidden_layers=44,
        num_attention_heads=12,
        num_key_value_heads=2,
        head_dim=128,
        vocab_size=130049,
        rope_theta=100000000000.0,
        rope_scaling=None,
        mamba_d_conv=4,
        mamba_d_head=128,
        mamba_d_ssm=3072,
        mamba_d_state=256,
        mamba_expand=2,
        mamba_n_groups=1,
        mamba_n_heads=24,
        mamba_norm_before_gate=False,
        mamba_rms_norm=True,
        attention_in_multiplier=2.0,
        key_multiplier=0.030690398488999456,
        lm_head_multiplier=0.013020833333333334,
        mlp_multipliers=[0.2946278254943948, 0.032552083333333336],
        ssm_in_multiplier=0.4166666666666667,
        ssm_multipliers=[0.3535533905932738, 0.25, 0.1767766952966369, 0.5, 0.3535533905932738],
    )
    assert num_parameters(config) == 7_585_654_880
    assert state_bytes(config, 2) == 44 * (3 * (3072 + 512) * 2 + 24 * 256 * 128 * 4)
    assert kv_token_bytes(config, 2) == 44 * 2 * 2 * 128 * 2
    assert isinstance(config.state_layers, Mamba2Config)
    assert config.state_layers.input_scales == pytest.approx((0.1473139, 0.1041667, 0.0736570, 0.2083333, 0.1473139))
    assert (config.gate_scale, config.key_scale) == (0.2946278254943948, 0.030690398488999456)
    assert config.attention_scale == 4 * 128**-0.5
    assert config.logits_scaling == pytest.approx(76.8)
    assert config.falcon_h1 == FalconH1Config(2.0, 1.0, mlp_out_scale=0.032552083333333336)


def test_layers_of_command_with_experts_by_its_pattern(tmp_path):
    """The first ones, which have an MLP, have a pattern of their own, by which all of them turn."""
    config = read(
        tmp_path,
        "Cohere2MoeForCausalLM",
        num_hidden_layers=5,
        first_k_dense_replace=2,
        prefix_dense_intermediate_size=64,
        num_experts_per_tok=2,
        num_experts=6,
        num_shared_experts=2,
        sliding_window=32,
        sliding_window_pattern=2,
    )
    assert config.moe is not None
    assert config.moe.sparse_layers == (False, False, True, True, True)
    assert (config.moe.intermediate_size, config.intermediate_size) == (101, 64)
    assert (config.moe.shared_expert_intermediate_size, config.moe.shared_scaling_factor) == (202, 0.5)
    assert config.sliding_windows == (None, None, 32, None, 32)
    assert [rope.rope_type for rope in config.ropes] == ["default", "default", "default", "none", "default"]
    assert (config.norm, config.ropes[0].theta) == ("layer", 1e4)


def test_what_guesses_ahead_is_left_out(tmp_path):
    hy3 = read(tmp_path, "HYV3ForCausalLM", **MIXTURE, num_nextn_predict_layers=1)
    assert hy3.unread_parts == ("model.layers.3.",)
    assert (hy3.head_dim, hy3.ropes[0].theta) == (128, 11_158_840.0)
    assert read(tmp_path, "MellumForCausalLM", **MIXTURE).unread_parts == ("mtp.",)
    assert read(tmp_path, "NemotronHForCausalLM", hybrid_override_pattern="M*").unread_parts == ("mtp.",)
    exaone = read(tmp_path, "ExaoneMoeForCausalLM", **MIXTURE, sliding_window=32)
    assert exaone.unread_parts == ("mtp.",)
    assert exaone.moe is not None
    assert (exaone.moe.routed_scaling_factor, exaone.moe.sparse_layers) == (2.5, (False, True, True))


def test_windows_and_positions_of_exaone_4(tmp_path):
    """Those without a window know no positions, but where none has a window all do."""
    mixed = read(tmp_path, "Exaone4ForCausalLM", num_hidden_layers=4, sliding_window=32, sliding_window_pattern=4)
    assert mixed.sliding_windows == (32, 32, 32, None)
    assert [rope.rope_type for rope in mixed.ropes] == ["default", "default", "default", "none"]
    small = read(tmp_path, "Exaone4ForCausalLM", sliding_window=None, layer_types=["full_attention"] * 3)
    assert small.sliding_windows == (None, None, None)
    assert {rope.rope_type for rope in small.ropes} == {"default"}


def test_minimax_m2_as_it_is_published(tmp_path):
    """How much of a head is rotated is a number of dimensions; what guesses further tokens is left out."""
    fields = {"head_dim": 16, "rotary_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "num_mtp_modules": 2}
    published = {"qk_norm_type": "per_layer", "use_qk_norm": True, "shared_intermediate_size": 0, "attn_type_list": [1]}
    config = read(tmp_path, "MiniMaxM2ForCausalLM", **fields, **published, scoring_func="sigmoid")
    assert (config.rotary_dim, config.ropes[0].theta, config.qk_norm) == (8, 5e6, "all")
    assert config.unread_parts == ("model.layers.3.", "model.layers.4.")
    assert config.moe is not None
    assert (config.moe.has_correction, config.moe.norm_topk_prob, config.moe.intermediate_size) == (True, True, 101)


def test_what_a_config_leaves_out_is_what_its_family_has(tmp_path):
    sizes = {"hidden_size": 96, "num_attention_heads": 6}
    stable = read(tmp_path, "StableLmForCausalLM", **sizes)
    assert (stable.rotary_dim, stable.rms_norm_eps, stable.tie_word_embeddings) == (4, 1e-5, False)
    nemotron = read(tmp_path, "NemotronForCausalLM", **sizes)
    assert (nemotron.rotary_dim, nemotron.norm_offset, nemotron.rms_norm_eps) == (8, 1.0, 1e-5)
    ernie = read(tmp_path, "Ernie4_5ForCausalLM", **sizes)
    assert (ernie.head_dim, ernie.tie_word_embeddings, ernie.ropes[0].theta) == (128, True, 5e5)
    glm = read(tmp_path, "Glm4ForCausalLM", **sizes)
    assert (glm.head_dim, glm.rotary_dim, glm.rms_norm_eps, glm.qkv_bias) == (128, 64, 1.5625e-7, True)
    apertus = read(tmp_path, "ApertusForCausalLM", **sizes)
    assert (apertus.ropes[0].rope_type, apertus.ropes[0].theta, apertus.ropes[0].factor) == ("llama3", 1.2e7, 8.0)
