"""What a model is and what the engine may use. Frozen, checked once, free of torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .errors import ConfigError, ModelError

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
DTYPE_NAMES: tuple[str, ...] = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")
SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
)


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding: base frequency and, for stretched contexts, how frequencies are rescaled.

    `factor` and the three `llama3` fields are as in Hugging Face's `rope_scaling`; they are unused for
    `rope_type="default"`.
    """

    theta: float
    rope_type: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclass(frozen=True)
class ModelConfig:
    """A decoder's shape as `config.json` gives it, with the families' differences resolved into plain fields."""

    path: Path
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope: RopeConfig
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    # One entry a layer: how many of the latest tokens it attends to, or None for all of them.
    sliding_windows: tuple[int | None, ...]
    eos_token_ids: tuple[int, ...]
    checkpoint_dtype: str

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "ModelConfig":
        """Read `config.json` (and the stop ids of `generation_config.json`) of a Hugging Face model folder.

        Raises `ModelError` when the folder is no model, the architecture is not one of
        `SUPPORTED_ARCHITECTURES`, or a needed field is missing.
        """
        folder = Path(path)
        raw = _read_config(folder)
        architecture = _architecture(folder, raw)
        try:
            return _from_raw(folder, architecture, raw)
        except KeyError as missing:
            raise ModelError(f"{folder / 'config.json'} has no field {missing}") from missing
        except (TypeError, ValueError) as error:
            raise ModelError(f"{folder / 'config.json'} has a field of the wrong kind: {error}") from error


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.exists():
        raise ModelError(f"model folder {folder} does not exist: name a folder here, nothing is downloaded")
    file = folder / "config.json"
    if not file.is_file():
        raise ModelError(f"{folder} is not a model folder: it has no config.json")
    return read_json_object(file)


def read_json_object(file: Path) -> dict[str, Any]:
    """What a model folder's JSON file holds. Raises `ModelError` when it is no JSON object."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{file} must hold a JSON object")
    return content


def _architecture(folder: Path, raw: dict[str, Any]) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in SUPPORTED_ARCHITECTURES:
            return str(name)
    found = ", ".join(map(str, names)) or raw.get("model_type") or "none named"
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    raise ModelError(f"unsupported architecture {found} in {folder}; supported: {supported}")


def _from_raw(folder: Path, architecture: str, raw: dict[str, Any]) -> ModelConfig:
    family = architecture.removesuffix("ForCausalLM")
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ModelError(f"unsupported hidden_act {raw['hidden_act']!r} in {folder / 'config.json'}; supported: silu")
    heads = int(raw["num_attention_heads"])
    attention_bias = bool(raw.get("attention_bias", False))
    return ModelConfig(
        path=folder,
        architecture=architecture,
        vocab_size=int(raw["vocab_size"]),
        hidden_size=int(raw["hidden_size"]),
        intermediate_size=int(raw["intermediate_size"]),
        num_hidden_layers=int(raw["num_hidden_layers"]),
        num_attention_heads=heads,
        num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
        head_dim=int(raw.get("head_dim") or int(raw["hidden_size"]) // heads),
        rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        max_position_embeddings=int(raw["max_position_embeddings"]),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        rope=_rope(folder, raw),
        qkv_bias=family == "Qwen2" or (family in ("Llama", "Qwen3") and attention_bias),
        output_bias=family in ("Llama", "Qwen3") and attention_bias,
        mlp_bias=family == "Llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=family == "Qwen3",
        sliding_windows=_sliding_windows(family, raw),
        eos_token_ids=_eos_token_ids(folder, raw),
        checkpoint_dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
    )


def _rope(folder: Path, raw: dict[str, Any]) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling` (before)."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
    if rope_type == "default":
        return RopeConfig(theta)
    if rope_type == "linear":
        return RopeConfig(theta, "linear", factor=float(scaling["factor"]))
    if rope_type == "llama3":
        return RopeConfig(
            theta,
            "llama3",
            factor=float(scaling["factor"]),
            low_freq_factor=float(scaling["low_freq_factor"]),
            high_freq_factor=float(scaling["high_freq_factor"]),
            original_max_position_embeddings=int(scaling["original_max_position_embeddings"]),
        )
    raise ModelError(
        f"unsupported rope scaling {rope_type!r} in {folder / 'config.json'}; supported: default, linear, llama3"
    )


def _sliding_windows(family: str, raw: dict[str, Any]) -> tuple[int | None, ...]:
    num_layers = int(raw["num_hidden_layers"])
    window = raw.get("sliding_window")
    uses_window = family == "Mistral" or (family != "Llama" and bool(raw.get("use_sliding_window", False)))
    if not window or not uses_window:
        return (None,) * num_layers
    if layer_types := raw.get("layer_types"):
        return tuple(int(window) if kind == "sliding_attention" else None for kind in layer_types)
    # Qwen's layers below max_window_layers attend to everything; Mistral's all have the window.
    first = 0 if family == "Mistral" else int(raw.get("max_window_layers", 28))
    return tuple(int(window) if layer >= first else None for layer in range(num_layers))


def _eos_token_ids(folder: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """`generation_config.json` may list more stop ids than `config.json`, as chat models do."""
    file = folder / "generation_config.json"
    generation = read_json_object(file) if file.is_file() else {}
    ids: list[int] = []
    for value in (generation.get("eos_token_id"), raw.get("eos_token_id")):
        for token in value if isinstance(value, list) else [value]:
            if token is not None and token not in ids:
                ids.append(int(token))
    return tuple(ids)


@dataclass(frozen=True)
class EngineConfig:
    """Limits and choices of one engine; the names are vLLM's.

    `num_gpu_blocks_override` fixes the number of KV blocks (of `block_size` tokens each); without it
    `kv_cache_memory_bytes` decides. `max_model_len` defaults to the model's `max_position_embeddings`.
    `load_format="dummy"` reads no weights but draws them from `seed`: speed can be measured with a `config.json` alone.
    """

    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int = 2 * 1024**3
    num_gpu_blocks_override: int | None = None
    num_threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_NAMES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPE_NAMES)}, not {self.dtype!r}")
        if self.load_format not in LOAD_FORMATS:
            raise ConfigError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, not {self.load_format!r}")
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two, not {self.block_size}")
        for name in ("max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"):
            _require_positive(name, getattr(self, name))
        for name in ("max_model_len", "num_gpu_blocks_override", "num_threads"):
            if (value := getattr(self, name)) is not None:
                _require_positive(name, value)


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, not {value}")
