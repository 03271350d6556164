"""What `quantization_config` says of checkpoints, as those that quantise write it."""

from typing import Any

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "actorder": None}
BYTE = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel", "dynamic": False}


def compressed(form: str, weights: dict[str, Any], ignore: list[str], **changes: Any) -> dict[str, Any]:
    inputs = (
        None if form == "pack-quantized" else {**BYTE, "type": weights["type"], "strategy": "token", "dynamic": True}
    )
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignore,
        "kv_cache_scheme": None,
        **changes,
    }


HEAD = ["lm_head"]
MODELOPT = {"quant_method": "modelopt", "producer": {"name": "modelopt"}, "ignore": HEAD}
NVFP4 = {**MODELOPT, "quant_algo": "NVFP4", "group_size": 16, "ignore": [*HEAD, "*.down_proj"]}
MIXED = {
    **MODELOPT,
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        "mtp.layers.0.mlp.experts": {"quant_algo": "FP8_BLOCK_SCALES"},
        "lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        "model.layers.1.block_sparse_moe.experts": {"quant_algo": "NVFP4", "group_size": 16},
        **{f"model.layers.0.self_attn.{name}_proj": {"quant_algo": "FP8"} for name in "qkvo"},
    },
    "ignore": ["mtp*"],
}
