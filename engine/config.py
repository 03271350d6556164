"""What the engine may use. Frozen, checked once, free of torch."""

from dataclasses import dataclass
from typing import Literal

from .errors import ConfigError

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
DTYPE_NAMES: tuple[str, ...] = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")
QUANTIZATIONS = ("int8",)


@dataclass(frozen=True)
class EngineConfig:
    """Limits and choices of one engine; the names are vLLM's.

    `num_gpu_blocks_override` fixes the number of KV blocks (of `block_size` tokens each); without it
    `kv_cache_memory_bytes` decides. `max_model_len` defaults to the model's `max_position_embeddings`.
    `swap_space_bytes`: how much of the host's memory preempted sequences may leave their KV in; by default none on a
    CPU and 4 GiB beside a GPU. `load_format="dummy"` reads no weights but draws them from `seed`: speed can be
    measured with a `config.json` alone. `quantization="int8"` computes the decoder layers' products in int8, weights
    quantised as they are loaded and activations as they come, on a CPU that has what it needs; the rest keeps `dtype`.
    """

    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    quantization: str | None = None
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int = 2 * 1024**3
    num_gpu_blocks_override: int | None = None
    swap_space_bytes: int | None = None
    num_threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_NAMES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPE_NAMES)}, not {self.dtype!r}")
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            allowed = ", ".join(QUANTIZATIONS)
            raise ConfigError(f"quantization must be one of {allowed}, or none, not {self.quantization!r}")
        if self.load_format not in LOAD_FORMATS:
            raise ConfigError(f"load_format must be one of {', '.join(LOAD_FORMATS)}, not {self.load_format!r}")
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two, not {self.block_size}")
        for name in ("max_num_seqs", "max_num_batched_tokens", "kv_cache_memory_bytes"):
            _require_positive(name, getattr(self, name))
        for name in ("max_model_len", "num_gpu_blocks_override", "num_threads"):
            if (value := getattr(self, name)) is not None:
                _require_positive(name, value)
        if self.swap_space_bytes is not None and self.swap_space_bytes < 0:
            raise ConfigError(f"swap_space_bytes must be at least 0, not {self.swap_space_bytes}")


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, not {value}")
