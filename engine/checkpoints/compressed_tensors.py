"""The `quantization_config` of compressed-tensors, llm-compressor's format. Free of torch."""

import re
from typing import Any, Literal

from ..errors import ModelError
from .model_folder import Raw
from .quantization_fields import names_in, read_block, read_group_size
from .quantization_schemes import (
    NVFP4_GROUP,
    ByteScheme,
    Int4Scheme,
    Modules,
    Nvfp4Scheme,
    Pattern,
    QuantizationConfig,
    WeightScheme,
)
from .scalars import require, whole


def read_compressed_tensors(raw: Raw) -> QuantizationConfig:
    require(raw, "quantization_status", "compressed", "frozen")
    sparsity: Raw = raw.get("sparsity_config") or {}
    if (found := sparsity.get("format", "dense")) != "dense":
        raise ModelError(f"sparsity_config.format is {found!r}; supported: dense")
    transforms: Raw = raw.get("transform_config") or {}
    if transforms.get("config_groups"):
        raise ModelError("transform_config changes the activations, which is not supported")
    schemes = tuple(
        (_patterns(group["targets"]), _group(name, group, raw)) for name, group in raw["config_groups"].items()
    )
    return QuantizationConfig("compressed-tensors", schemes, _patterns(raw.get("ignore") or []))


_PACKED = (
    "pack-quantized with 4-bit int weights and no input_activations, nvfp4-pack-quantized with 4-bit float weights"
)
_BYTES = "int-quantized and float-quantized with 8-bit weights and 8-bit input_activations of the same type"


def _group(name: str, group: Raw, raw: Raw) -> WeightScheme:
    weights: Raw = group["weights"]
    inputs: Raw = group.get("input_activations") or {}
    kind, bits = _type(weights, f"config_groups.{name}.weights.")
    form = group.get("format") or raw.get("format") or "dense"
    if form == "pack-quantized" and (kind, bits) == ("int", 4) and not inputs:
        return _int4(name, weights)
    if form == "nvfp4-pack-quantized" and (kind, bits) == ("float", 4):
        require(weights, "group_size", NVFP4_GROUP, within=f"config_groups.{name}.weights.", is_needed=True)
        return Nvfp4Scheme("weight_packed", "weight_global_scale", divides=True)
    byte = (kind, bits) in (("int", 8), ("float", 8))
    same = bool(inputs) and _type(inputs, f"config_groups.{name}.input_activations.") == (kind, bits)
    if form in ("int-quantized", "float-quantized", "naive-quantized") and byte and same:
        return _bytes(name, weights)
    raise ModelError(
        f"config_groups.{name} has the format {form}, {bits}-bit {kind} weights and "
        f"{'input_activations' if inputs else 'no input_activations'}; supported: {_PACKED}, or {_BYTES}"
    )


def _type(raw: Raw, within: str) -> tuple[object, int]:
    return raw.get("type", "int"), whole(raw, "num_bits", 8, within=within)


def _int4(name: str, weights: Raw) -> Int4Scheme:
    strategy, order = weights.get("strategy"), weights.get("actorder")
    if strategy not in ("group", "channel"):
        raise ModelError(f"config_groups.{name}.weights.strategy is {strategy!r}; supported: group, channel")
    group_size = read_group_size(weights["group_size"]) if strategy == "group" else None
    has_order = order in ("group", "dynamic", True)
    return Int4Scheme("compressed-tensors", group_size, bool(weights.get("symmetric", True)), has_order)


def _bytes(name: str, weights: Raw) -> ByteScheme:
    field = f"config_groups.{name}.weights"
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel", "block"):
        raise ModelError(f"{field}.strategy is {strategy!r}; supported: tensor, channel, block")
    if not weights.get("symmetric", True):
        raise ModelError(f"{field}.symmetric is false for 8 bits; supported: true")
    kind: Literal["int8", "fp8"] = "int8" if weights.get("type", "int") == "int" else "fp8"
    if strategy != "block":
        return ByteScheme(kind, strategy)
    return ByteScheme(kind, "block", block=read_block(f"{field}.block_structure", weights["block_structure"]))


def _patterns(value: Any) -> tuple[Pattern, ...]:
    """Each is a module's name, `re:` and an expression, or the class of all modules."""
    named = names_in(value)
    expressions = [each.removeprefix("re:") for each in named if each.startswith("re:")]
    if "Linear" in named:
        expressions.append("")
    return (Modules(frozenset(named)), *map(re.compile, expressions))
