"""Model folders and engine options: what is read from them, and what is refused with which message."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.checkpoints.model_config import SUPPORTED_ARCHITECTURES, ModelConfig
from headrace.engine.checkpoints.model_shape import KVHeads, LayerInputsConfig, LayerSizes, MoeConfig
from headrace.engine.checkpoints.rope_config import RopeConfig
from headrace.engine.config import EngineConfig
from headrace.engine.errors import ConfigError, ModelError
from headrace.engine.execution.devices import resolve_device, resolve_dtype
from headrace.engine.kv_cache.kv_memory import KVMemory, num_blocks_in

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
}


def read(folder: Path, **changes: Any) -> ModelConfig:
    raw = {name: value for name, value in {**LLAMA, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw))
    return ModelConfig.from_pretrained(folder)


def test_fields_left_out_have_the_familys_defaults(tmp_path):
    config = read(tmp_path)
    assert (config.num_key_value_heads, config.head_dim) == (6, 8)
    assert config.ropes == (RopeConfig(10000.0),) * 4
    assert (config.rotary_dim, config.attention_scale) == (8, 8**-0.5)
    assert not config.tie_word_embeddings
    assert not any((config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm))
    assert config.sliding_windows == (None,) * 4
    assert config.eos_token_ids == ()
    assert config.checkpoint_dtype == "float32"


def test_older_and_newer_spellings_of_rope_and_dtype_mean_the_same(tmp_path):
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    older = read(tmp_path, rope_theta=5e5, rope_scaling={"type": "llama3", **scaling}, torch_dtype="bfloat16")
    newer = read(
        tmp_path,
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling},
        dtype="torch.bfloat16",
    )
    assert older == newer
    assert (older.ropes[0].theta, older.ropes[0].factor, older.checkpoint_dtype) == (5e5, 8.0, "bfloat16")


def test_eos_ids_come_from_both_files_without_doubles(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert read(tmp_path, eos_token_id=2).eos_token_ids == (7, 2)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, "2"]}))
    with pytest.raises(
        ModelError, match=r"/generation_config\.json: eos_token_id\[1\] must be a whole number, not '2'"
    ):
        read(tmp_path, eos_token_id=2)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 9}, (None, None, None, None)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 9}, (9, 9, 9, 9)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 512}, (None, None, None, None)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9}, (None, None, None, None)),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            (None, None, None, 9),
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 9, "use_sliding_window": True},
            (None, None, None, None),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (9, None, 9, None),
        ),
    ],
)
def test_sliding_windows_by_layer(tmp_path, changes, expected):
    assert read(tmp_path, **changes).sliding_windows == expected


def test_mixtures_say_which_layers_have_experts(tmp_path):
    moe = {"moe_intermediate_size": 20, "num_experts_per_tok": 2, "architectures": ["Qwen3MoeForCausalLM"]}
    assert read(tmp_path, num_experts=8, **moe).moe.sparse_layers == (True,) * 4
    stepped = read(tmp_path, num_local_experts=8, decoder_sparse_step=2, mlp_only_layers=[3], **moe).moe
    assert (stepped.num_experts, stepped.sparse_layers) == (8, (False, True, False, False))


def test_a_window_in_mixtures_of_qwen(tmp_path):
    used = {"sliding_window": 9, "use_sliding_window": True, "num_experts": 8, "num_experts_per_tok": 2}
    sizes = {"moe_intermediate_size": 20, "shared_expert_intermediate_size": 20}
    second = read(tmp_path, architectures=["Qwen2MoeForCausalLM"], max_window_layers=3, **used, **sizes)
    assert second.sliding_windows == (9, None, 9, None)
    third = read(tmp_path, architectures=["Qwen3MoeForCausalLM"], max_window_layers=3, **used, **sizes)
    assert third.sliding_windows == (9, 9, 9, 9)


def test_gemma_2_as_it_is_published(tmp_path):
    """Fields that google/gemma-2-2b names, and those it leaves to its family."""
    config = read(
        tmp_path,
        architectures=["Gemma2ForCausalLM"],
        head_dim=16,
        hidden_act="gelu_pytorch_tanh",
        hidden_activation="gelu_pytorch_tanh",
        attn_logit_softcapping=50.0,
        query_pre_attn_scalar=24,
        sliding_window=128,
    )
    assert config.sliding_windows == (128, None, 128, None)
    assert (config.tie_word_embeddings, config.norm_offset, config.decoder_layer) == (True, 1.0, "gemma")
    assert (config.attention_scale, config.attention_soft_cap, config.final_soft_cap) == (24**-0.5, 50.0, 30.0)


def test_gemma_3_as_it_is_published(tmp_path):
    """Older configs name the two ropes' bases apart and count the layers between full attention."""
    older = read(
        tmp_path,
        architectures=["Gemma3ForCausalLM"],
        num_hidden_layers=7,
        rope_theta=1000000,
        rope_local_base_freq=10000,
        rope_scaling={"factor": 8.0, "rope_type": "linear"},
        sliding_window=32,
        sliding_window_pattern=3,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
    )
    newer = read(
        tmp_path,
        architectures=["Gemma3ForCausalLM"],
        num_hidden_layers=7,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        sliding_window=32,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    )
    assert older == newer
    assert older.sliding_windows == (32, 32, None, 32, 32, None, 32)
    local, full = RopeConfig(1e4), RopeConfig(1e6, "linear", factor=8.0)
    assert older.ropes == (local, local, full, local, local, full, local)
    assert (older.attention_soft_cap, older.final_soft_cap, older.qk_norm, older.head_dim) == (None, None, "heads", 256)


FULL_HEADS = {"head_dim": 64, "num_key_value_heads": 1}
GEMMA_4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "num_hidden_layers": 7,
    "head_dim": 32,
    "num_key_value_heads": 3,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "sliding_window": 32,
    "final_logit_softcapping": 30.0,
    "use_bidirectional_attention": "vision",
}


def test_gemma_4_as_it_is_published(tmp_path):
    """As Google writes it, and as transformers does; what is left out, and what is null."""
    heads = {"global_head_dim": 64, "num_global_key_value_heads": 1, "layer_types": None}
    published = read(tmp_path, **GEMMA_4, **heads)
    assert published == read(tmp_path, **GEMMA_4, per_layer_config={"5": FULL_HEADS, "6": FULL_HEADS})
    # The last layer is without a window, whatever the pattern says.
    assert published.sliding_windows == (32,) * 5 + (None, None)
    sliding, full = LayerSizes(3, 32, 64), LayerSizes(1, 64, 64, keys_are_values=True)
    assert published.layers == (sliding,) * 5 + (full,) * 2
    assert published.kv_groups == {KVHeads(3, 32): [0, 1, 2, 3, 4], KVHeads(1, 64): [5, 6]}
    assert published.kv_places == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1)]
    assert published.ropes[4:6] == (
        RopeConfig(1e4),
        RopeConfig(1e6, "proportional", turning_share=0.25),
    )
    assert (published.attention_scale, published.norm_offset, published.final_soft_cap) == (1.0, 0.0, 30.0)
    assert (published.tie_word_embeddings, published.qk_norm, published.attention_soft_cap) == (True, "heads", None)
    whole = read(tmp_path, **GEMMA_4 | {"attention_k_eq_v": False}, num_global_key_value_heads=1)
    assert whole.layers[-1] == LayerSizes(3, 512, 64)


def test_layers_of_gemma_4_that_read_the_keys_of_others(tmp_path):
    """The last own layer of each kind has them, and the others' MLPs are wider."""
    fields = {**GEMMA_4, "attention_k_eq_v": False, "num_kv_shared_layers": 4, "use_double_wide_mlp": True}
    kinds = {"layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"]}
    inputs = {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 90}
    config = read(tmp_path, **fields | kinds | inputs)
    assert [sizes.kv_source for sizes in config.layers] == [None, None, None, 1, 2, 1, 1]
    assert [sizes.intermediate_size for sizes in config.layers] == [64] * 3 + [128] * 4
    assert config.kv_groups == {KVHeads(3, 32): [0, 2], KVHeads(3, 512): [1]}
    assert config.kv_places == [(0, 0), (1, 0), (0, 1), (1, 0), (0, 1), (1, 0), (1, 0)]
    assert config.layer_inputs == LayerInputsConfig(12, 90)
    assert config.names.layer_norms[-1] == "post_per_layer_input_norm"
    plain = read(tmp_path, **fields | {"use_double_wide_mlp": False}, **kinds)
    assert ({sizes.intermediate_size for sizes in plain.layers}, plain.layer_inputs) == ({64}, None)


def test_gemma_4s_mixture(tmp_path):
    sizes = {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 24}
    config = read(tmp_path, **GEMMA_4, enable_moe_block=True, **sizes)
    assert config.moe == MoeConfig(8, 2, 24, True, (True,) * 7, "gemma4", has_mlp_beside=True)
    assert len(config.names.layer_norms) == 7
    assert read(tmp_path, **GEMMA_4, enable_moe_block=False, **sizes).moe is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all': a model that looks ahead"),
        ({"per_layer_config": {"6": FULL_HEADS}}, "per_layer_config has other heads than one kind"),
        ({"per_layer_config": {"0": FULL_HEADS}}, "per_layer_config has other heads than one kind"),
        ({"per_layer_config": {"6": {"hidden_size": 8}}}, "per_layer_config has hidden_size; supported: head_dim"),
        (
            {"num_kv_shared_layers": 6},
            "num_kv_shared_layers leaves 1 layers with keys and values, of which none is like",
        ),
        ({"num_global_key_value_heads": 4}, "num_attention_heads 6 is no multiple of num_key_value_heads 4"),
    ],
)
def test_gemmas_4_that_cannot_be_served(tmp_path, changes, message):
    with pytest.raises(ModelError, match=message):
        read(tmp_path, **GEMMA_4 | changes)


def test_phi_3_as_it_is_published(tmp_path):
    """The original context stands beside the rope's fields, and most of a head may be rotated."""
    config = read(
        tmp_path,
        architectures=["Phi3ForCausalLM"],
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        partial_rotary_factor=0.75,
        rope_scaling={"type": "su", "short_factor": [1.0, 1.1, 1.2], "long_factor": [1.0, 4.0, 9.0]},
        sliding_window=262144,
    )
    (rope, *_) = config.ropes
    assert (rope.rope_type, rope.original_max_position_embeddings, rope.factor) == ("longrope", 4096, 32.0)
    assert rope.attention_factor == pytest.approx((1 + 5 / 12) ** 0.5)
    assert (config.rotary_dim, config.has_fused_qkv, config.rms_norm_eps) == (6, True, 1e-5)


def test_yarn_stretches_a_context_that_the_config_gives_as_it_was(tmp_path):
    """As Qwen 2.5's model cards have it."""
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert read(tmp_path, rope_scaling=rope).max_position_embeddings == 2048
    assert read(tmp_path, rope_scaling=rope, max_position_embeddings=2048).max_position_embeddings == 2048


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [("Llama", (True, True)), ("Mistral", (False, False)), ("Qwen2", (True, False)), ("Qwen3", (True, True))],
)
def test_attention_bias_means_what_each_family_makes_of_it(tmp_path, architecture, expected):
    config = read(tmp_path, architectures=[f"{architecture}ForCausalLM"], attention_bias=True)
    assert (config.qkv_bias, config.output_bias) == expected


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(ModelError, match=f"model folder {tmp_path / 'nowhere'} does not exist"):
        ModelConfig.from_pretrained(tmp_path / "nowhere")


def test_a_folder_that_is_no_model(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        ModelConfig.from_pretrained(tmp_path)


def test_a_file_instead_of_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="is not a model folder"):
        ModelConfig.from_pretrained(tmp_path / "file")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"architectures": ', "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[]", "must hold a JSON object"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_json(tmp_path, name, content, message):
    read(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError) as error:
        ModelConfig.from_pretrained(tmp_path)
    assert message in one_line(error)
    assert name in str(error.value)


def test_an_unsupported_architecture_is_named_with_the_list_of_what_is(tmp_path):
    with pytest.raises(ModelError) as error:
        read(tmp_path, architectures=["BloomForCausalLM"])
    assert "BloomForCausalLM" in one_line(error)
    assert all(name in str(error.value) for name in SUPPORTED_ARCHITECTURES)


def test_no_architecture_at_all(tmp_path):
    with pytest.raises(ModelError, match="unsupported architecture gpt2"):
        read(tmp_path, architectures=None, model_type="gpt2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "no field 'hidden_size'"),
        ({"vocab_size": "many"}, "config.json: vocab_size must be a whole number, not 'many'"),
        ({"vocab_size": [1]}, "vocab_size must be a whole number, not [1]"),
        ({"vocab_size": float("inf")}, "vocab_size must be a whole number, not inf"),
        ({"vocab_size": 9.5}, "vocab_size must be a whole number, not 9.5"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number, not True"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number, not 'small'"),
        ({"rope_theta": {}}, "rope_theta must be a number, not {}"),
        (
            {"rope_scaling": {"type": "linear", "factor": [2]}},
            "config.json: rope_scaling.factor must be a number, not [2]",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "config.json: rope_scaling.factor must be above 0, not 0"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "config.json has no field 'rope_parameters.factor'"),
        (
            {
                "architectures": ["Gemma3ForConditionalGeneration"],
                "text_config": {
                    "model_type": "gemma3_text",
                    "rope_parameters": {"full_attention": {"rope_type": "linear", "factor": "8"}},
                },
            },
            "config.json: text_config.rope_parameters.full_attention.factor must be a number, not '8'",
        ),
        (
            {"architectures": ["Olmo3ForCausalLM"], "rope_parameters": {"sliding_attention": "yarn"}},
            "config.json: rope_parameters.sliding_attention must be a JSON object, not 'yarn'",
        ),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": -1}, "sliding_window must be at least 1, or null"),
        ({"architectures": ["Lfm2MoeForCausalLM"], "num_dense_layers": "2"}, "num_dense_layers must be a whole number"),
        ({"eos_token_id": {"a": 1}}, "/config.json: eos_token_id must be a whole number, not {'a': 1}"),
        ({"eos_token_id": [1, "2"]}, "/config.json: eos_token_id[1] must be a whole number, not '2'"),
        (
            {
                "architectures": ["Gemma3ForConditionalGeneration"],
                "text_config": {"model_type": "gemma3_text", "eos_token_id": "1"},
            },
            "/config.json: text_config.eos_token_id must be a whole number, not '1'",
        ),
        ({"architectures": 1}, "config.json: architectures is 1, and must be a list of names"),
        ({"architectures": [["LlamaForCausalLM"]]}, "unsupported architecture ['LlamaForCausalLM']"),
        ({"rope_parameters": [1]}, "config.json: rope_parameters must be a JSON object, not [1]"),
        ({"text_config": {"rope_scaling": "yarn"}}, "text_config.rope_scaling must be a JSON object, not 'yarn'"),
        (
            {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": []},
            "text_config must be a JSON object",
        ),
        ({"hidden_act": ["silu"]}, "hidden_act is ['silu']"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_scaling": {"type": "ntk"}}, "unsupported rope_scaling.type 'ntk'; supported: default, linear"),
        ({"rope_scaling": {"type": "linear"}}, "no field 'rope_scaling.factor'"),
        ({"rope_scaling": {"type": "longrope"}}, "no field 'rope_scaling.short_factor'"),
        (
            {"rope_scaling": {"type": "su", "short_factor": [1] * 4, "long_factor": [1] * 3}},
            "short_factor and long_factor have 4 and 3 entries where there are 4 frequencies",
        ),
        ({"num_attention_heads": 0}, "config.json: num_attention_heads must be at least 1, not 0"),
        ({"num_attention_heads": 999, "num_key_value_heads": 1}, "config.json: head_dim must be at least 1, not 0"),
        ({"head_dim": 7}, "7 of a head's 7 numbers would be rotated: head_dim and partial_rotary_factor must make"),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 1.5}, "12 of a head's 8 numbers would be"),
        ({"num_hidden_layers": -1}, "config.json: num_hidden_layers must be at least 1, not -1"),
        ({"num_hidden_layers": 10**12}, "config.json: num_hidden_layers must be at most 10,000, not 1000000000000"),
        ({"num_nextn_predict_layers": 10**12}, "config.json: num_nextn_predict_layers must be at most 10,000, not"),
        ({"vision_config": {"depth": 10_001}}, "config.json: vision_config.depth must be at most 10,000, not 10001"),
        ({"vocab_size": 0}, "config.json: vocab_size must be at least 1, not 0"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 is no multiple of num_key_value_heads 4"),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 3},
            "num_experts_per_tok is 3 of 2 experts",
        ),
        (
            {"architectures": ["MixtralForCausalLM"], "num_local_experts": 2, "num_experts_per_tok": 0},
            "num_experts_per_tok must be at least 1, not 0",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"]},
            "layer_types has 1 entries for 4 layers",
        ),
        ({"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "gelu"}, "hidden_activation is 'gelu'"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "looks ahead"),
        ({"architectures": ["MixtralForCausalLM"]}, "no field 'num_local_experts'"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            "quantization_config: quant_method is 'hqq'; supported: gptq",
        ),
    ],
)
def test_configs_that_cannot_be_served(tmp_path, changes, message):
    with pytest.raises(ModelError) as error:
        read(tmp_path, **changes)
    assert message in one_line(error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": "5"}, "max_num_seqs must be a whole number, not '5'"),
        ({"max_num_seqs": 1.5}, "max_num_seqs must be a whole number, not 1.5"),
        ({"max_num_seqs": None}, "max_num_seqs must be a whole number, not None"),
        ({"max_model_len": True}, "max_model_len must be a whole number, not True"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization must be a number, not '0.9'"),
        ({"enable_prefix_caching": "no"}, "enable_prefix_caching must be true or false, not 'no'"),
        ({"block_size": 12}, "block_size must be a power of two, not 12"),
        ({"block_size": 0}, "block_size must be a power of two, not 0"),
        ({"dtype": "int3"}, "dtype must be one of auto, float32, bfloat16, float16, not 'int3'"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, not 0"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens must be at least 1, not -1"),
        ({"max_model_len": 0}, "max_model_len must be at least 1, not 0"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override must be at least 1, not 0"),
        *(
            ({name: 2**62}, f"{name} must be at most 2147483647, not {2**62}")
            for name in (
                *("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_gpu_blocks_override", "block_size"),
                *("max_loras", "max_lora_rank", "tensor_parallel_size", "pipeline_parallel_size"),
            )
        ),
        (
            {"cuda_graph_sizes": ()},
            "cuda_graph_sizes must name at least one size; enforce_eager=True turns CUDA graphs off",
        ),
        (
            {"cuda_graph_sizes": range(1, 501)},
            "cuda_graph_sizes must name at most 256 sizes, as memory is set aside for each, not 500",
        ),
        (
            {"cuda_graph_sizes": (8, 65), "max_num_batched_tokens": 64},
            "cuda_graph_sizes must be between 1 and max_num_batched_tokens=64, not 65",
        ),
    ],
)
def test_engine_options_out_of_range(options, message):
    with pytest.raises(ConfigError) as error:
        EngineConfig(**options)
    assert one_line(error) == message


def test_kv_memory_is_counted_in_whole_blocks(tmp_path):
    model = read(tmp_path, num_key_value_heads=2)
    bytes_of_block = 2 * 4 * 2 * 8 * 16 * 2
    # One of them stays zero.
    assert num_blocks_in(bytes_of_block * 4 + 1, model, 16, torch.bfloat16) == 3
    with pytest.raises(ConfigError, match=f"less than two KV blocks of {bytes_of_block} bytes"):
        num_blocks_in(2 * bytes_of_block - 1, model, 16, torch.bfloat16)


def test_kv_memory_that_no_machine_has_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="lower kv_cache_memory_bytes"):
        KVMemory(read(tmp_path), 2**40, 16, torch.float32, torch.device("cpu"))


def test_devices_and_dtypes():
    cpu = torch.device("cpu")
    assert resolve_device("cpu") == cpu
    assert resolve_dtype("float16", "float32", cpu) == torch.float16
    assert resolve_dtype("auto", "float32", cpu) == torch.float32
    assert resolve_dtype("auto", "float16", cpu) == torch.float32
    assert resolve_dtype("auto", "bfloat16", torch.device("cuda")) == torch.bfloat16
    with pytest.raises(ConfigError, match="unknown dtype 'nonsense'"):
        resolve_dtype("auto", "nonsense", cpu)
    for unusable in ("abacus", "mps", "meta"):
        with pytest.raises(ConfigError, match="device must be"):
            resolve_device(unusable)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_where_there_is_none():
    with pytest.raises(ConfigError, match="torch finds no CUDA GPU"):
        resolve_device("cuda:0")
