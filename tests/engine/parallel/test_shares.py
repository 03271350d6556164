"""Shares of a model compute together what the whole model does, however many there are."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.errors import ConfigError
from headrace.engine.sharding.shard import Shard
from headrace.kernels.linear import supports_int8
from headrace.kernels.native import has_bfloat16

from .sharing import CPU, FROM_FILE, Way, assert_close, logits_of, saved_logits, shared_logits
from .small_models import MODELS, QUANTIZED, WITH_STATES, write_model


@pytest.mark.parametrize("name", [*MODELS, "gemma4-small"])
def test_of_every_family(name, tmp_path):
    config = ModelConfig.from_pretrained(write_model(tmp_path, name))
    expected = saved_logits(config)
    # Drawn: the same random weights. Then read: each its slices. Four of some models share heads of keys.
    torch.testing.assert_close(shared_logits(config, 2), expected)
    torch.testing.assert_close(shared_logits(config, 4, FROM_FILE), expected)


@pytest.mark.parametrize("name", WITH_STATES)
def test_of_layers_with_states(name, tmp_path):
    config = ModelConfig.from_pretrained(write_model(tmp_path, name))
    expected = saved_logits(config)
    assert_close(shared_logits(config, 2), expected)
    assert_close(shared_logits(config, 4, FROM_FILE), expected)


@pytest.mark.parametrize("name", QUANTIZED)
def test_of_quantised_checkpoints(name, tmp_path):
    config = ModelConfig.from_pretrained(write_model(tmp_path, quantization_config=QUANTIZED[name], hidden_size=128))
    expected = saved_logits(config)
    assert expected.isfinite().all()
    torch.testing.assert_close(shared_logits(config, 2), expected)
    torch.testing.assert_close(shared_logits(config, 2, FROM_FILE), expected)


@pytest.mark.parametrize("quantization", ["gptq", "fp8-blocks"])
def test_of_quantised_checkpoints_with_latents(quantization, tmp_path):
    fields = {"hidden_size": 128, "q_lora_rank": 64, "qk_rope_head_dim": 16}
    folder = write_model(tmp_path, "deepseek-v3", quantization_config=QUANTIZED[quantization], **fields)
    config = ModelConfig.from_pretrained(folder)
    expected = saved_logits(config)
    assert expected.isfinite().all()
    torch.testing.assert_close(shared_logits(config, 2), expected)
    torch.testing.assert_close(shared_logits(config, 2, FROM_FILE), expected)


# Of sizes that are cut between groups. (Of Mamba each rank's steps of time are fewer than a block of FP8.)
_QWEN_SIZES = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "shared_expert_intermediate_size": 64}
_NEMOTRON_SIZES = {"mamba_num_heads": 16, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64}


@pytest.mark.parametrize(
    ("name", "quantization", "sizes"),
    [
        *(
            (name, quantization, _QWEN_SIZES)
            for name in ("qwen3-next", "qwen3.5", "qwen3.5-moe")
            for quantization in ("gptq", "fp8-blocks")
        ),
        ("nemotron-h", "gptq", _NEMOTRON_SIZES),
        ("lfm2-moe", "gptq", {}),
        ("lfm2-moe", "fp8-blocks", {}),
        ("nemotron-h", "nvfp4", _NEMOTRON_SIZES),
    ],
)
def test_of_quantised_checkpoints_with_states(name, quantization, sizes, tmp_path):
    folder = write_model(tmp_path, name, quantization_config=QUANTIZED[quantization], hidden_size=128, **sizes)
    config = ModelConfig.from_pretrained(folder)
    expected = saved_logits(config)
    assert expected.isfinite().all()
    assert_close(shared_logits(config, 2), expected)
    assert_close(shared_logits(config, 2, FROM_FILE), expected)


@pytest.mark.parametrize(
    ("name", "quantization"), [("llama-bias-tied", None), ("llama-bias-tied", "int8"), ("qwen3.5", None)]
)
def test_in_layouts_of_the_compiled_kernels(name, quantization, tmp_path):
    """They round: to bfloat16, and each rank its activations to int8 by scales of its own."""
    dtype = torch.float32 if quantization and not has_bfloat16() else torch.bfloat16
    if quantization and not supports_int8(dtype, CPU):
        pytest.skip("no compiled kernels here")
    config = ModelConfig.from_pretrained(write_model(tmp_path, name))
    expected = logits_of(Way().load(config))
    found = shared_logits(config, 2, Way(dtype=dtype, quantization=quantization))
    assert (found - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(
    ("fields", "size", "message"),
    [
        ({}, 3, "tensor_parallel_size=3 must divide num_attention_heads=8"),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, 6, "num_key_value_heads=4"),
        ({**WITH_STATES["qwen3.5"], "linear_num_key_heads": 2}, 4, "must divide linear_num_key_heads=2 of"),
        ({"intermediate_size": 129}, 2, "tensor_parallel_size=2 must divide intermediate_size=129"),
        ({"quantization_config": {**QUANTIZED["gptq"], "desc_act": True}}, 2, "desc_act"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_both_numbers(fields, size, message, tmp_path):
    config = ModelConfig.from_pretrained(write_model(tmp_path, **fields))
    with pytest.raises(ConfigError, match=message):
        Shard(0, size, config)


def test_the_size_of_mlps_that_no_layer_has_need_not_be_divided(tmp_path):
    """Of Nemotron 3 the layers without experts have Mamba or attention alone."""
    fields = {"hybrid_override_pattern": "M*EM*E", "intermediate_size": 129}
    config = ModelConfig.from_pretrained(write_model(tmp_path, "nemotron-h", **fields))
    expected = saved_logits(config)
    assert_close(shared_logits(config, 2, FROM_FILE), expected)


def test_stacked_experts_either_way_round(tmp_path):
    """transformers writes outputs before inputs, the models' authors the other way round."""
    config = ModelConfig.from_pretrained(write_model(tmp_path, "qwen3.5-moe"))
    expected = saved_logits(config)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    turned = {name: tensor.mT.contiguous() for name, tensor in tensors.items() if ".mlp.experts." in name}
    assert len(turned) == 2 * config.num_hidden_layers
    save_file(tensors | turned, file)
    assert_close(shared_logits(config, 2, FROM_FILE), expected)


def test_groups_of_a_quantised_weight_stay_whole(tmp_path):
    config = ModelConfig.from_pretrained(write_model(tmp_path, quantization_config=QUANTIZED["gptq"], hidden_size=128))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=8 would split groups of 32 inputs of .*o_proj"):
        shared_logits(config, 8)


@pytest.mark.parametrize(
    ("name", "part"), [("qwen3.5", "outputs of .*in_proj_qkv"), ("qwen3-next", "inputs of .*out_proj")]
)
def test_blocks_of_a_quantised_weight_stay_whole(name, part, tmp_path):
    """Of four ranks each would have 16 outputs of queries; of what lies together 128, and 48 inputs of the values."""
    folder = write_model(tmp_path, name, quantization_config=QUANTIZED["fp8-blocks"], hidden_size=128)
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size=4 would split groups of 32 {part}\."):
        shared_logits(ModelConfig.from_pretrained(folder), 4)


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"method": "draft_model", "model": "draft"}},
    ],
)
def test_what_does_not_go_with_it_is_refused_by_both_names(options):
    with pytest.raises(ConfigError, match=rf"{next(iter(options))}.* tensor_parallel_size=2"):
        EngineConfig(tensor_parallel_size=2, **options)
