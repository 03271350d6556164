"""What llama.cpp's converter makes of layers with a Gated DeltaNet, with numbers as their own places."""

from collections.abc import Iterator
from typing import Any

import gguf
import numpy as np

Array = np.ndarray[Any, Any]
ARCHITECTURES = {"qwen3_next": "qwen3next", "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe"}


def stored_parts(config: dict[str, Any], name: str, weight: Array) -> Iterator[tuple[str, Array]]:
    """A checkpoint's tensor as the tensors that the converter makes of it, by names that its package knows."""
    module, keys = name.removesuffix(".weight"), config["linear_num_key_heads"]
    if module.endswith("in_proj_qkvz"):
        parts = _of_key_heads(config, weight.reshape(keys, -1, weight.shape[1]))
        queries, of_keys, values, gates = (part.reshape(-1, weight.shape[1]) for part in parts)
        yield module.replace("qkvz", "qkv"), np.concatenate((queries, of_keys, values))
        yield module.replace("qkvz", "z"), gates
    elif module.endswith("conv1d"):
        yield module, _tiled(config, module, weight.squeeze(1))
    else:
        yield module.replace("dt_bias", "dt_proj"), _tiled(config, module, weight)


def numbers_as_stored(name: str, numbers: Array) -> Array:
    if name.endswith("A_log"):
        return -np.exp(numbers)
    return numbers + 1 if _is_raised(name) else numbers


def numbers_as_trained(name: str, numbers: Array) -> Array:
    if name.endswith("A_log"):
        return np.log(-numbers)
    return numbers - 1 if _is_raised(name) else numbers


def add_sizes(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["linear_num_value_heads"]
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * heads)
    writer.add_full_attention_interval(4)


def _is_raised(name: str) -> bool:
    return name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")


def _of_key_heads(config: dict[str, Any], weight: Array) -> list[Array]:
    """Queries, keys, values and gates. weight: [key heads, what belongs to one, inputs]."""
    key_dim = config["linear_key_head_dim"]
    values = config["linear_value_head_dim"] * config["linear_num_value_heads"] // config["linear_num_key_heads"]
    return np.split(weight, (key_dim, 2 * key_dim, 2 * key_dim + values), axis=1)


def _tiled(config: dict[str, Any], module: str, weight: Array) -> Array:
    """Qwen3.5's value heads: the first of each key head, then the second of each, and so on."""
    kind, axis, first = module.rpartition(".")[2], 0, 0
    if config["model_type"] == "qwen3_next" or "linear_attn" not in module or kind == "norm":
        return weight
    if kind in ("in_proj_qkv", "conv1d"):
        first = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    if kind == "out_proj":
        axis = 1
    before, values = np.split(weight, (first,), axis=axis)
    heads = (config["linear_num_key_heads"], config["linear_num_value_heads"] // config["linear_num_key_heads"])
    shape = (*values.shape[:axis], *heads, -1, *values.shape[axis + 1 :])
    turned = values.reshape(shape).swapaxes(axis, axis + 1).reshape(values.shape)
    return np.concatenate((before, turned), axis=axis)
