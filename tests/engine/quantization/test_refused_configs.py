"""What `quantization_config` says that cannot be read is named."""

import json
import re
from typing import Any

import pytest
from transformers import LlamaConfig

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.errors import ModelError

from .quantization_configs import AWQ, BYTE, GPTQ, HEAD, INT4, MIXED, MODELOPT, NVFP4, compressed

INT8_GROUP = compressed("int-quantized", {**BYTE, "type": "int"}, HEAD)["config_groups"]["group_0"]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "method": (
        {"quant_method": "bitsandbytes"},
        "quant_method is 'bitsandbytes'; supported: gptq, awq, fp8, compressed",
    ),
    "no method": ({"bits": 4}, "quant_method is None; supported: gptq"),
    "gptq bits": ({**GPTQ, "bits": 8}, "quantization_config (gptq): bits is 8; supported: 4"),
    "no bits": ({"quant_method": "gptq"}, "bits is None; supported: 4"),
    "gptq format": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'; supported: gptq, gptq_v2"),
    "group size": ({**GPTQ, "group_size": 16}, "group_size is 16; supported: multiples of 32, or -1"),
    "dynamic": (
        {**GPTQ, "dynamic": {"+:.*": {"bits": 8}}},
        "dynamic has the rule '+:.*': {'bits': 8}; supported: rules that leave",
    ),
    "awq version": ({**AWQ, "version": "gemv"}, "version is 'gemv'; supported: gemm, GEMM"),
    "awq zeros": ({**AWQ, "zero_point": False}, "zero_point is False; supported: True"),
    "fp8 kind": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'; supported: e4m3"),
    "wide int4": (
        compressed("pack-quantized", {**INT4, "num_bits": 8}, HEAD),
        "config_groups.group_0 has the format pack-quantized, 8-bit int weights and no input_activations; supported: ",
    ),
    "weights alone": (
        compressed(
            "int-quantized",
            {**BYTE, "type": "int"},
            HEAD,
            config_groups={"g": {**INT8_GROUP, "input_activations": None}},
        ),
        "config_groups.g has the format int-quantized, 8-bit int weights and no input_activations",
    ),
    "mixed bytes": (
        compressed("float-quantized", BYTE, HEAD, config_groups={"g": {**INT8_GROUP, "weights": BYTE}}),
        "8-bit float weights and input_activations; supported",
    ),
    "strategy": (
        compressed("pack-quantized", {**INT4, "strategy": "tensor_group"}, HEAD),
        "config_groups.group_0.weights.strategy is 'tensor_group'; supported: group, channel",
    ),
    "asymmetric int8": (
        compressed("int-quantized", {**BYTE, "type": "int", "symmetric": False}, HEAD),
        "config_groups.group_0.weights.symmetric is false for 8 bits; supported: true",
    ),
    "modelopt algorithm": (
        {**MODELOPT, "quant_algo": "NVFP4_AWQ"},
        "quant_algo is 'NVFP4_AWQ'; supported: FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO, NVFP4, W4A16_NVFP4, MIXED_P",
    ),
    "modelopt layer": (
        {**MIXED, "quantized_layers": {"model.layers.0.mlp": {"quant_algo": "W4A8_AWQ"}}},
        "quantization_config (modelopt): quantized_layers.model.layers.0.mlp.quant_algo is 'W4A8_AWQ'; supported: FP8",
    ),
    "modelopt group size": ({**NVFP4, "group_size": 32}, "group_size is 32; supported: 16"),
    "modelopt group size of a layer": (
        {**MIXED, "quantized_layers": {"model.layers.0.mlp": {"quant_algo": "NVFP4", "group_size": 32}}},
        "quantized_layers.model.layers.0.mlp.group_size is 32; supported: 16",
    ),
    "modelopt blocks": (
        {**MODELOPT, "quant_algo": "FP8_PB_WO", "group_size": -1},
        "group_size makes blocks of -1",
    ),
    "fp8 blocks": (
        {"quant_method": "fp8", "weight_block_size": [0, 128]},
        "weight_block_size makes blocks of 0",
    ),
    "fp8 blocks of one size": (
        {"quant_method": "fp8", "weight_block_size": [128]},
        "weight_block_size must be a number of outputs and one of inputs, not [128]",
    ),
    "fp8 blocks in words": (
        {"quant_method": "fp8", "weight_block_size": [128, "all"]},
        "weight_block_size[1] must be a whole number, not 'all'",
    ),
    "a group size in words": ({**AWQ, "group_size": "all"}, "(awq): group_size must be a whole number, not 'all'"),
    "bits in words": (
        compressed("pack-quantized", {**INT4, "num_bits": "four"}, HEAD),
        ".weights.num_bits must be a whole number, not 'four'",
    ),
    "modelopt keys": ({**NVFP4, "kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo is 'NVFP4'"),
    "nvfp4 group size": (
        compressed("nvfp4-pack-quantized", {**INT4, "type": "float"}, HEAD),
        ".weights.group_size is 32; supported: 16",
    ),
    "sparsity": (
        compressed("float-quantized", BYTE, HEAD, sparsity_config={"format": "sparse-24-bitmask"}),
        "sparsity_config.format is 'sparse-24-bitmask'; supported: dense",
    ),
    "a missing field": ({"quant_method": "compressed-tensors", "format": "x"}, "has no field 'config_groups'"),
    "a list that is none": ({**AWQ, "modules_to_not_convert": "gate"}, "field of the wrong kind: 'gate' is no list"),
    "a pattern that is none": (compressed("pack-quantized", INT4, ["re:("]), "has a field of the wrong kind"),
}


@pytest.mark.parametrize(("quantization", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_read_is_refused_at_the_config(quantization, message, tmp_path):
    LlamaConfig(architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    with pytest.raises(ModelError, match=re.escape(message)):
        ModelConfig.from_pretrained(tmp_path)
