"""Which weights of a checkpoint are quantised, and how: `quantization_config` of its `config.json`. Free of torch."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from itertools import accumulate
from typing import Any, Literal, Protocol

from ..errors import ModelError
from .model_folder import Raw

# In MXFP4 and in NVFP4, how many weights share a scale.
MXFP4_GROUP, NVFP4_GROUP = 32, 16
# Of GGUF's types, how many weights share a scale.
_BYTE_GROUPS = {"Q5_0": 32, "Q8_0": 32, "Q6_K": 16}


@dataclass(frozen=True)
class Int4Scheme:
    """Four bits a weight, with a scale and a zero for each group of `group_size` inputs (None: of all) (W4A16).

    `layout`: the format, or GGUF's type of blocks. `is_symmetric`: every zero is 8. `has_order`: `g_idx` says which
    group an input belongs to. `are_zeros_less_one`: GPTQ's first format stores them so.
    """

    layout: Literal["gptq", "awq", "compressed-tensors", "Q4_0", "Q4_1", "Q4_K"]
    group_size: int | None
    is_symmetric: bool
    has_order: bool = False
    are_zeros_less_one: bool = False

    @property
    def has_minima(self) -> bool:
        """Whether floats are for zeros."""
        return self.layout in ("Q4_1", "Q4_K")


@dataclass(frozen=True)
class ByteScheme:
    """A byte a weight, and activations quantised to the same as they come (W8A8).

    `scales`: one for the whole weight, for each output, or for each `block` of outputs and inputs. `scale_name`: what
    the checkpoint calls them, beside the weight.
    """

    kind: Literal["int8", "fp8"]
    scales: Literal["tensor", "channel", "block"]
    scale_name: str = "weight_scale"
    block: tuple[int, int] = (128, 128)


@dataclass(frozen=True)
class BlockScheme:
    """Up to a byte a weight, with a scale for each block of a row, of one of GGUF's types (W8A16 on some CPUs)."""

    layout: Literal["Q5_0", "Q8_0", "Q6_K"]
    group_size: int


@dataclass(frozen=True)
class Mxfp4Scheme:
    """Four bits a weight, floats, with a power of two for each `MXFP4_GROUP` inputs (W4A16 on a GPU)."""


@dataclass(frozen=True)
class Nvfp4Scheme:
    """Four bits a weight, floats, with an 8-bit float for each `NVFP4_GROUP` inputs and a factor for all (W4A16).

    Names are what the checkpoint calls them; its factor `divides` or not.
    """

    weight_name: str = "weight"
    factor_name: str = "weight_scale_2"
    divides: bool = False


WeightScheme = Int4Scheme | ByteScheme | BlockScheme | Mxfp4Scheme | Nvfp4Scheme


class Pattern(Protocol):
    """What modules' names are matched with, from their beginning."""

    def match(self, string: str, /) -> object: ...


@dataclass(frozen=True)
class Modules:
    """Modules by their names, and all in them; of thousands one is found as soon as of a few. See `Pattern`."""

    names: frozenset[str]

    def match(self, string: str, /) -> bool:
        return any(before in self.names for before in accumulate(string.split("."), "{}.{}".format))


@dataclass(frozen=True)
class QuantizationConfig:
    """How a checkpoint was quantised. `method` is its name.

    `schemes`: the patterns of the modules that each is for, the first that fits counts. `ignored`: those of modules
    that stay as they were.
    """

    method: str
    schemes: tuple[tuple[tuple[Pattern, ...], WeightScheme], ...]
    ignored: tuple[Pattern, ...]

    def scheme(self, names: Sequence[str]) -> WeightScheme | None:
        """How the modules of these names are quantised, which become one: None where they are not.

        Raises `ModelError` where they differ.
        """
        found = [self._scheme(name) for name in names]
        if any(each != found[0] for each in found):
            raise ModelError(
                f"quantization_config quantises {', '.join(names)} in different ways; they are multiplied as one and "
                "must be alike"
            )
        return found[0]

    def _scheme(self, name: str) -> WeightScheme | None:
        if _matches(self.ignored, name):
            return None
        return next((scheme for patterns, scheme in self.schemes if _matches(patterns, name)), None)


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
    _require(raw, "bits", 4)
    _require(raw, "checkpoint_format", "gptq", "gptq_v2", default="gptq")
    _require(raw, "is_marlin_format", False, default=False)
    scheme = Int4Scheme(
        "gptq",
        _group_size(raw.get("group_size", 128)),
        is_symmetric=bool(raw.get("sym", True)),
        has_order=bool(raw.get("desc_act", False)),
        are_zeros_less_one=raw.get("checkpoint_format", "gptq") == "gptq",
    )
    ignored = [] if raw.get("lm_head") else [_inside("lm_head")]
    targets = raw.get("modules_in_block_to_quantize") or []
    patterns = [re.compile(rf".*\.{re.escape(name)}$") for names in targets for name in _listed(names)]
    if raw.get("lm_head"):
        patterns.append(_inside("lm_head"))
    everywhere = (re.compile(""),)
    return QuantizationConfig(
        "gptq", ((tuple(patterns) if targets else everywhere, scheme),), (*ignored, *_gptq_exceptions(raw))
    )


def _gptq_exceptions(raw: Raw) -> Iterable[re.Pattern[str]]:
    """The modules that `dynamic` leaves out; it may also give some other bits, which is refused."""
    for rule in raw.get("dynamic") or {}:
        if not rule.startswith("-:"):
            raise ModelError(f"dynamic has the rule {rule!r}; supported: rules that leave modules out (-:pattern)")
        yield re.compile(rule.removeprefix("-:"))


def _awq(raw: Raw) -> QuantizationConfig:
    _require(raw, "bits" if "bits" in raw else "w_bit", 4)
    _require(raw, "version", "gemm", "GEMM", default="gemm")
    _require(raw, "zero_point", True, default=True)
    group_size = raw["group_size"] if "group_size" in raw else raw.get("q_group_size", 128)
    scheme = Int4Scheme("awq", _group_size(group_size), is_symmetric=False)
    return QuantizationConfig("awq", (((re.compile(""),), scheme),), _left_out(raw, "modules_to_not_convert"))


def _fp8(raw: Raw) -> QuantizationConfig:
    _require(raw, "activation_scheme", "dynamic", "static", default="dynamic")
    _require(raw, "fmt", "e4m3", default="e4m3")
    block = raw.get("weight_block_size")
    if block:
        scheme = ByteScheme("fp8", "block", "weight_scale_inv", _block("weight_block_size", block))
    else:
        # What says that there are no blocks calls the scale as if there were.
        scheme = ByteScheme("fp8", "tensor", "weight_scale_inv" if "weight_block_size" in raw else "weight_scale")
    ignored = (*_left_out(raw, "modules_to_not_convert"), *_left_out(raw, "ignored_layers"))
    return QuantizationConfig("fp8", (((re.compile(""),), scheme),), ignored)


def _compressed_tensors(raw: Raw) -> QuantizationConfig:
    _require(raw, "quantization_status", "compressed", "frozen", default="compressed")
    sparsity: Raw = raw.get("sparsity_config") or {}
    if (found := sparsity.get("format", "dense")) != "dense":
        raise ModelError(f"sparsity_config.format is {found!r}; supported: dense")
    transforms: Raw = raw.get("transform_config") or {}
    if transforms.get("config_groups"):
        raise ModelError("transform_config changes the activations, which is not supported")
    schemes = tuple(
        (tuple(map(_named, _listed(group["targets"]))), _compressed_group(name, group, raw))
        for name, group in raw["config_groups"].items()
    )
    return QuantizationConfig("compressed-tensors", schemes, tuple(map(_named, _listed(raw.get("ignore") or []))))


_PACKED = (
    "pack-quantized with 4-bit int weights and no input_activations, nvfp4-pack-quantized with 4-bit float weights"
)
_BYTES = "int-quantized and float-quantized with 8-bit weights and 8-bit input_activations of the same type"


def _compressed_group(name: str, group: Raw, raw: Raw) -> WeightScheme:
    weights: Raw = group["weights"]
    inputs: Raw = group.get("input_activations") or {}
    kind, bits = weights.get("type", "int"), int(weights.get("num_bits", 8))
    form = group.get("format") or raw.get("format") or "dense"
    if form == "pack-quantized" and (kind, bits) == ("int", 4) and not inputs:
        return _compressed_int4(name, weights)
    if form == "nvfp4-pack-quantized" and (kind, bits) == ("float", 4):
        _require(weights, "group_size", NVFP4_GROUP, within=f"config_groups.{name}.weights.")
        return Nvfp4Scheme("weight_packed", "weight_global_scale", divides=True)
    byte = (kind, bits) in (("int", 8), ("float", 8))
    same = bool(inputs) and (inputs.get("type", "int"), int(inputs.get("num_bits", 8))) == (kind, bits)
    if form in ("int-quantized", "float-quantized", "naive-quantized") and byte and same:
        return _compressed_bytes(name, weights)
    raise ModelError(
        f"config_groups.{name} has the format {form}, {bits}-bit {kind} weights and "
        f"{'input_activations' if inputs else 'no input_activations'}; supported: {_PACKED}, or {_BYTES}"
    )


def _compressed_int4(name: str, weights: Raw) -> Int4Scheme:
    strategy, order = weights.get("strategy"), weights.get("actorder")
    if strategy not in ("group", "channel"):
        raise ModelError(f"config_groups.{name}.weights.strategy is {strategy!r}; supported: group, channel")
    group_size = _group_size(weights["group_size"]) if strategy == "group" else None
    has_order = order in ("group", "dynamic", True)
    return Int4Scheme("compressed-tensors", group_size, bool(weights.get("symmetric", True)), has_order)


def _compressed_bytes(name: str, weights: Raw) -> ByteScheme:
    field = f"config_groups.{name}.weights"
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel", "block"):
        raise ModelError(f"{field}.strategy is {strategy!r}; supported: tensor, channel, block")
    if not weights.get("symmetric", True):
        raise ModelError(f"{field}.symmetric is false for 8 bits; supported: true")
    kind: Literal["int8", "fp8"] = "int8" if weights.get("type", "int") == "int" else "fp8"
    if strategy != "block":
        return ByteScheme(kind, strategy)
    return ByteScheme(kind, "block", block=_block(f"{field}.block_structure", weights["block_structure"]))


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
    return QuantizationConfig("mxfp4", (((experts,), Mxfp4Scheme()),), _left_out(raw, "modules_to_not_convert"))


_MODELOPT_FP8: dict[str, Literal["tensor", "channel", "block"]] = {
    "FP8": "tensor",
    "FP8_PER_CHANNEL_PER_TOKEN": "channel",
    "FP8_PB_WO": "block",
}
_MODELOPT_NVFP4 = ("NVFP4", "W4A16_NVFP4")


def _modelopt(raw: Raw) -> QuantizationConfig:
    """NVIDIA's. What `config.json` calls `ignore` is `exclude_modules` in `hf_quant_config.json`."""
    raw = {**raw, **(raw.get("quantization") or {})}
    if "NVFP4" in str(raw.get("kv_cache_quant_algo") or raw.get("kv_cache_scheme")).upper():
        raise ModelError("kv_cache_quant_algo is 'NVFP4', of which the scales of keys and values are; supported: FP8")
    ignored = _listed(raw.get("ignore") or raw.get("exclude_modules") or [])
    patterns = (re.compile(translate(each)) if "*" in each else _inside(each) for each in ignored)
    return QuantizationConfig("modelopt", tuple(_modelopt_schemes(raw)), tuple(patterns))


def _modelopt_schemes(raw: Raw) -> Iterable[tuple[tuple[Pattern, ...], WeightScheme]]:
    if raw.get("quant_algo", "") is None:
        # Keys and values alone.
        return
    if raw.get("quant_algo") != "MIXED_PRECISION":
        yield (re.compile(""),), _modelopt_scheme("", raw)
        return
    names: dict[WeightScheme, set[str]] = {}
    for name, layer in raw["quantized_layers"].items():
        # What guesses tokens ahead is never read.
        if not name.startswith("mtp"):
            names.setdefault(_modelopt_scheme(f"quantized_layers.{name}.", layer), set()).add(name)
    yield from (((Modules(frozenset(each)),), scheme) for scheme, each in names.items())


def _modelopt_scheme(field: str, raw: Raw) -> WeightScheme:
    """field: where `raw` stands."""
    algo = str(raw.get("quant_algo")).upper()
    if algo in _MODELOPT_NVFP4:
        _require(raw, "group_size", NVFP4_GROUP, default=NVFP4_GROUP, within=field)
        return Nvfp4Scheme()
    if algo in _MODELOPT_FP8:
        size = raw.get("group_size") or 128
        return ByteScheme("fp8", _MODELOPT_FP8[algo], block=_block(f"{field}group_size", (size, size)))
    supported = ", ".join((*_MODELOPT_FP8, *_MODELOPT_NVFP4, "MIXED_PRECISION"))
    raise ModelError(f"{field}quant_algo is {raw.get('quant_algo')!r}; supported: {supported}")


_READERS: dict[Any, Callable[[Raw], QuantizationConfig]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "gguf": _gguf,
    "mxfp4": _mxfp4,
    "modelopt": _modelopt,
}


def _require(raw: Raw, field: str, *allowed: object, default: object = None, within: str = "") -> None:
    """within: where `raw` stands."""
    if (value := raw.get(field, default)) not in allowed:
        raise ModelError(f"{within}{field} is {value!r}; supported: {', '.join(map(str, allowed))}")


def _block(field: str, sizes: Iterable[Any]) -> tuple[int, int]:
    """Of how many outputs and inputs each scale is."""
    rows, columns = map(int, sizes)
    if min(rows, columns) < 1:
        raise ModelError(f"{field} makes blocks of {rows} by {columns}: both must be at least 1")
    return rows, columns


def _group_size(value: Any) -> int | None:
    """-1 stands for all inputs. Smaller groups than 32 inputs, or such that cross its multiples, have no kernel."""
    size = int(value)
    if size == -1:
        return None
    if size < 1 or size % 32:
        raise ModelError(f"group_size is {size}; supported: multiples of 32, or -1")
    return size


def _left_out(raw: Raw, field: str) -> tuple[re.Pattern[str], ...]:
    """The modules that such a list names, whole or by a part of their names between dots, and the head.

    Outside of compressed-tensors no one quantises a head unless asked to.
    """
    return tuple(map(_inside, ["lm_head", *_listed(raw.get(field) or [])]))


def _inside(name: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?{re.escape(name.strip('.'))}(\..*)?$")


def _named(pattern: str) -> re.Pattern[str]:
    """compressed-tensors' patterns: a module's name, `re:` and an expression, or the class of all of them."""
    if pattern == "Linear":
        return re.compile("")
    return re.compile(pattern[3:] if pattern.startswith("re:") else re.escape(pattern) + "$")


def _listed(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise TypeError(f"{value!r} is no list of names")
    return value


def _matches(patterns: Iterable[Pattern], name: str) -> bool:
    return any(pattern.match(name) for pattern in patterns)
