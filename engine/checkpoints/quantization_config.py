"""Which weights of a checkpoint are quantised, and how: `quantization_config` of its `config.json`. Free of torch."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ModelError, shown
from .compressed_tensors import read_compressed_tensors
from .model_folder import Raw
from .modelopt import read_modelopt
from .quantization_fields import names_in, read_block, read_group_size
from .quantization_schemes import (
    BlockScheme,
    ByteScheme,
    Int4Scheme,
    ModulesWithin,
    Mxfp4Scheme,
    Pattern,
    QuantizationConfig,
    WeightScheme,
)
from .scalars import require

# Of GGUF's types, how many weights share a scale.
_BYTE_GROUPS = {"Q5_0": 32, "Q8_0": 32, "Q6_K": 16}


def read_quantization(raw: Raw) -> QuantizationConfig | None:
    """What a `config.json` says of the weights: None where they are as they were trained.

    Raises `ModelError` naming the field of what cannot be read, and what can.
    """
    found = raw.get("quantization_config") or raw.get("compression_config")
    if not found:
        return None
    if not isinstance(found, dict):
        raise ModelError("quantization_config must be a JSON object")
    if (method := found.get("quant_method")) not in _READERS:
        supported = ", ".join(_READERS)
        raise ModelError(f"quantization_config: quant_method is {method!r}; supported: {supported}")
    try:
        return _READERS[method](found)
    except ModelError as error:
        raise ModelError(f"quantization_config ({method}): {error}") from error
    except KeyError as missing:
        raise ModelError(f"quantization_config ({method}) has no field {missing}") from missing
    except (TypeError, ValueError, AttributeError, OverflowError, re.error) as error:
        raise ModelError(f"quantization_config ({method}) has a field of the wrong kind: {error}") from error


def _gptq(raw: Raw) -> QuantizationConfig:
    require(raw, "bits", 4, is_needed=True)
    require(raw, "checkpoint_format", "gptq", "gptq_v2")
    require(raw, "is_marlin_format", False)
    scheme = Int4Scheme(
        "gptq",
        read_group_size(raw.get("group_size", 128)),
        is_symmetric=bool(raw.get("sym", True)),
        has_order=bool(raw.get("desc_act", False)),
        are_zeros_less_one=raw.get("checkpoint_format", "gptq") == "gptq",
    )
    has_head, head = bool(raw.get("lm_head")), ModulesWithin.of(["lm_head"])
    targets = raw.get("modules_in_block_to_quantize") or []
    patterns: list[Pattern] = [re.compile(rf".*\.{re.escape(name)}$") for names in targets for name in names_in(names)]
    if has_head:
        patterns.append(head)
    everywhere = (re.compile(""),)
    ignored = () if has_head else (head,)
    schemes = ((tuple(patterns) if targets else everywhere, scheme),)
    return QuantizationConfig("gptq", schemes, (*ignored, _read_dynamic(raw)))


@dataclass(frozen=True)
class _Dynamic:
    """The modules that GPTQModel's `dynamic` leaves out; of its rules, each with whether it does, the first counts."""

    rules: tuple[tuple[bool, re.Pattern[str]], ...]

    def match(self, string: str, /) -> bool:
        return next((leaves_out for leaves_out, pattern in self.rules if pattern.match(string)), False)


def _read_dynamic(raw: Raw) -> _Dynamic:
    """Refuses rules that give some modules other bits than all have."""
    rules: list[tuple[bool, re.Pattern[str]]] = []
    for rule, fields in (raw.get("dynamic") or {}).items():
        leaves_out = rule.startswith("-:")
        if not leaves_out and any(raw.get(name) != value for name, value in (fields or {}).items()):
            raise ModelError(
                f"dynamic has the rule {rule!r}: {shown(fields)}; supported: rules that leave modules out (-:pattern), "
                "or say what holds for all"
            )
        rules.append((leaves_out, re.compile(rule.removeprefix("-:").removeprefix("+:"))))
    return _Dynamic(tuple(rules))


def _awq(raw: Raw) -> QuantizationConfig:
    require(raw, "bits" if "bits" in raw else "w_bit", 4, is_needed=True)
    require(raw, "version", "gemm", "GEMM")
    require(raw, "zero_point", True)
    group_size = raw["group_size"] if "group_size" in raw else raw.get("q_group_size", 128)
    scheme = Int4Scheme("awq", read_group_size(group_size), is_symmetric=False)
    return QuantizationConfig("awq", (((re.compile(""),), scheme),), (_left_out(raw, "modules_to_not_convert"),))


def _fp8(raw: Raw) -> QuantizationConfig:
    require(raw, "activation_scheme", "dynamic", "static")
    require(raw, "fmt", "e4m3")
    block = raw.get("weight_block_size")
    if block:
        scheme = ByteScheme("fp8", "block", "weight_scale_inv", read_block("weight_block_size", block))
    else:
        # What says that there are no blocks calls the scale as if there were.
        scheme = ByteScheme("fp8", "tensor", "weight_scale_inv" if "weight_block_size" in raw else "weight_scale")
    ignored = (_left_out(raw, "modules_to_not_convert", "ignored_layers"),)
    return QuantizationConfig("fp8", (((re.compile(""),), scheme),), ignored)


def _gguf(raw: Raw) -> QuantizationConfig:
    """The modules of a GGUF file that stay as they are, by their type. See `gguf.config`."""
    schemes = tuple(
        ((re.compile(f"({'|'.join(map(re.escape, names))})$"),), _of_blocks(kind))
        for kind, names in raw["modules"].items()
    )
    return QuantizationConfig("gguf", schemes, ())


def _of_blocks(kind: Any) -> WeightScheme:
    if kind in _BYTE_GROUPS:
        return BlockScheme(kind, _BYTE_GROUPS[kind])
    return Int4Scheme(kind, 32, is_symmetric=kind == "Q4_0")


def _mxfp4(raw: Raw) -> QuantizationConfig:
    """The experts of gpt-oss alone."""
    experts = re.compile(r".*\.mlp\.experts\.")
    return QuantizationConfig("mxfp4", (((experts,), Mxfp4Scheme()),), (_left_out(raw, "modules_to_not_convert"),))


_READERS: dict[Any, Callable[[Raw], QuantizationConfig]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "compressed-tensors": read_compressed_tensors,
    "gguf": _gguf,
    "mxfp4": _mxfp4,
    "modelopt": read_modelopt,
}


def _left_out(raw: Raw, *fields: str) -> ModulesWithin:
    """The modules that these lists name, and the head, which outside of compressed-tensors no one quantises unasked."""
    return ModulesWithin.of(["lm_head", *(name for field in fields for name in names_in(raw.get(field) or []))])
