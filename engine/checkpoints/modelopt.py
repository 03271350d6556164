"""The `quantization_config` of NVIDIA's ModelOpt, or its `hf_quant_config.json`. Free of torch."""

import re
from collections.abc import Iterable
from fnmatch import translate
from typing import Literal

from ..errors import ModelError
from .model_folder import Raw
from .quantization_fields import names_in, read_block
from .quantization_schemes import (
    NVFP4_GROUP,
    ByteScheme,
    ModulesWithin,
    Nvfp4Scheme,
    Pattern,
    QuantizationConfig,
    WeightScheme,
)
from .scalars import require

_FP8: dict[str, Literal["tensor", "channel", "block"]] = {
    "FP8": "tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "channel",
    "FP8_PB_WO": "block",
}
_NVFP4 = ("NVFP4", "W4A16_NVFP4")


def read_modelopt(raw: Raw) -> QuantizationConfig:
    """NVIDIA's. What `config.json` calls `ignore` is `exclude_modules` in `hf_quant_config.json`."""
    raw = {**raw, **(raw.get("quantization") or {})}
    if "NVFP4" in str(raw.get("kv_cache_quant_algo") or raw.get("kv_cache_scheme")).upper():
        raise ModelError("kv_cache_quant_algo is 'NVFP4', of which the scales of keys and values are; supported: FP8")
    ignored = names_in(raw.get("ignore") or raw.get("exclude_modules") or [])
    globs = (re.compile(translate(each)) for each in ignored if "*" in each)
    others = ModulesWithin.of(each for each in ignored if "*" not in each)
    return QuantizationConfig("modelopt", tuple(_schemes(raw)), (others, *globs))


def _schemes(raw: Raw) -> Iterable[tuple[tuple[Pattern, ...], WeightScheme]]:
    if raw.get("quant_algo", "") is None:
        # Keys and values alone.
        return
    if raw.get("quant_algo") != "MIXED_PRECISION":
        yield (re.compile(""),), _scheme("", raw)
        return
    names: dict[WeightScheme, set[str]] = {}
    for name, layer in raw["quantized_layers"].items():
        # What guesses tokens ahead is never read.
        if not name.startswith("mtp"):
            names.setdefault(_scheme(f"quantized_layers.{name}.", layer), set()).add(name)
    yield from (((ModulesWithin.of(each),), scheme) for scheme, each in names.items())


def _scheme(field: str, raw: Raw) -> WeightScheme:
    """field: where `raw` stands."""
    algo = str(raw.get("quant_algo")).upper()
    if algo in _NVFP4:
        require(raw, "group_size", NVFP4_GROUP, within=field)
        return Nvfp4Scheme()
    if algo in _FP8:
        size = raw.get("group_size") or 128
        return ByteScheme("fp8", _FP8[algo], block=read_block(f"{field}group_size", (size, size)))
    supported = ", ".join((*_FP8, *_NVFP4, "MIXED_PRECISION"))
    raise ModelError(f"{field}quant_algo is {raw.get('quant_algo')!r}; supported: {supported}")
