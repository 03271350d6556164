"""What llama.cpp's converter makes of LFM2, Granite 4, Falcon-H1 and Nemotron-H, with numbers as their own places."""

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np

Array = np.ndarray[Any, Any]
Config = dict[str, Any]
_LFM2 = ("lfm2", "lfm2_moe")
MODEL_TYPES = (*_LFM2, "granitemoe", "granitemoehybrid", "falcon_h1", "nemotron_h")
# Of float32 in every file, whatever their shape.
_SMALL = (".conv.conv.", "conv1d", "A_log", ".D", "mixer.norm", "mamba.norm", "router.layer", ".gate.weight")
_STATES = ("conv", "mamba", "linear_attention")


def architecture(config: Config) -> str:
    match config["model_type"]:
        case "lfm2" | "granitemoe" as name:
            return str(name)
        case "lfm2_moe":
            return "lfm2moe"
        case "falcon_h1":
            return "falcon-h1"
        case "nemotron_h":
            return "nemotron_h_moe" if "moe" in config["layers_block_type"] else "nemotron_h"
        case _:
            if _has_states(config):
                return "granitehybrid"
            return "granitemoe" if config["num_local_experts"] else "granite"


def num_layers(config: Config) -> int:
    return len(config["layers_block_type"]) if config["model_type"] == "nemotron_h" else config["num_hidden_layers"]


def is_small(name: str) -> bool:
    return any(part in name for part in _SMALL)


def stored_parts(config: Config, name: str, weight: Array) -> Iterator[tuple[str, Array]]:
    """A checkpoint's tensor as the tensors that the converter makes of it, by names that its package knows."""
    module = name.removesuffix(".weight").removesuffix(".bias").removesuffix("_bias")
    before, _, last = module.rpartition(".")
    if last == "dt":
        yield f"{before}.dt_proj", weight
    elif name.endswith(("conv1d.weight", "conv.conv.weight")):
        yield module, weight.squeeze(1)
    elif last == "pre_ff_layernorm" and config["model_type"] == "falcon_h1":
        # The one tensor that the package knows with its ending, and leaves that off.
        yield name, weight
    elif last in ("A_log", "D"):
        yield module, weight[:, np.newaxis]
    elif module.endswith(("mixer.norm", "mamba.norm")):
        yield module, weight.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)
    elif last == "input_linear":
        gate, up = np.split(weight, 2, axis=-2)
        kind = "experts." if "sparse" in before else "shared_expert." if config["num_local_experts"] else ""
        layer = before.rpartition(".")[0]
        yield f"{layer}.mlp.{kind}gate_proj", gate
        yield f"{layer}.mlp.{kind}up_proj", up
    elif module.endswith("shared_mlp.output_linear") and not config["num_local_experts"]:
        yield module.replace("shared_mlp.output_linear", "mlp.down_proj"), weight
    elif ".experts." in module:
        merged = module.replace("backbone.", "model.").replace("mixer.", "mlp.")
        yield merged.removeprefix("model.") if config["model_type"] == "lfm2_moe" else merged, weight
    else:
        yield name if last == "expert" else module, weight


def numbers_as_stored(config: Config, name: str, numbers: Array) -> Array:
    return -np.exp(numbers) if name.endswith("A_log") else numbers * scales(config, name)


def numbers_as_trained(config: Config, name: str, numbers: Array) -> Array:
    return np.log(-numbers) if name.endswith("A_log") else numbers / scales(config, name)


def scales(config: Config, name: str) -> Any:
    """What a weight is multiplied by: Falcon-H1's are by what scales their outputs or inputs."""
    if config["model_type"] != "falcon_h1":
        return np.float32(1)
    attention, (gates, mlp) = config["attention_in_multiplier"], config["mlp_multipliers"]
    inner, grouped = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    parts = [inner, inner, grouped, grouped, config["mamba_n_heads"]]
    found = {
        "embed_tokens": config["embedding_multiplier"],
        "q_proj": attention,
        "k_proj": attention * config["key_multiplier"],
        "v_proj": attention,
        "o_proj": config["attention_out_multiplier"],
        "in_proj": config["ssm_in_multiplier"] * np.repeat(config["ssm_multipliers"], parts)[:, np.newaxis],
        "out_proj": config["ssm_out_multiplier"],
        "gate_proj": gates,
        "down_proj": mlp,
        "lm_head": config["lm_head_multiplier"],
    }
    return np.float32(found.get(name.split(".")[-2], 1.0))


def add_sizes(writer: gguf.GGUFWriter, config: Config) -> None:
    """What is beside that of all models."""
    match config["model_type"]:
        case "lfm2" | "lfm2_moe":
            writer.add_shortconv_l_cache(config["conv_L_cache"])
        case "nemotron_h":
            writer.add_ssm_time_step_rank(config["mamba_num_heads"])
            writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
            writer.add_ssm_group_count(config["n_groups"])
            writer.add_ssm_state_size(config["ssm_state_size"])
            writer.add_ssm_conv_kernel(config["conv_kernel"])
        case "granitemoehybrid" | "falcon_h1":
            writer.add_ssm_time_step_rank(config["mamba_n_heads"])
            writer.add_ssm_inner_size(config.get("mamba_d_ssm") or config["mamba_expand"] * config["hidden_size"])
            writer.add_ssm_group_count(config["mamba_n_groups"])
            writer.add_ssm_state_size(config["mamba_d_state"])
            writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    match config["model_type"]:
        case "granitemoehybrid":
            writer.add_rope_scaling_finetuned(not _has_states(config))
            if config["num_local_experts"]:
                writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if writer.arch in ("lfm2moe", "nemotron_h_moe"):
        _add_experts(writer, config)


def kv_heads(config: Config) -> int | list[int]:
    """Layers that do not attend have none."""
    kinds = config.get("layers_block_type") or config.get("layer_types")
    if not kinds or not _has_states(config):
        return int(config["num_key_value_heads"])
    return [config["num_key_value_heads"] if "attention" in kind and kind not in _STATES else 0 for kind in kinds]


def inner_sizes(config: Config) -> int | list[int]:
    match config["model_type"]:
        case "nemotron_h":
            own = {"mlp": config["intermediate_size"], "moe": config["moe_intermediate_size"]}
            return [own.get(kind, 0) for kind in config["layers_block_type"]]
        case "lfm2":
            inner, multiple = int(2 * config["intermediate_size"] / 3), config["block_multiple_of"]
            return -(-inner // multiple) * multiple
        case "granitemoehybrid" if not config["num_local_experts"]:
            return int(config["shared_intermediate_size"])
        case _:
            return int(config["intermediate_size"])


def _add_experts(writer: gguf.GGUFWriter, config: Config) -> None:
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["model_type"] == "lfm2_moe":
        writer.add_leading_dense_block_count(config["num_dense_layers"])
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        return
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    if latent := config["moe_latent_size"]:
        writer.add_moe_latent_size(latent)


def _has_states(config: Config) -> bool:
    return any(kind in _STATES for kind in config.get("layers_block_type") or config.get("layer_types") or ())
