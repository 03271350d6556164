"""One step on the device: the model, its KV cache, and where they live."""

import math
from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from .batch import Batch
from .config import EngineConfig, ModelConfig
from .errors import ConfigError
from .models import load_model


class ModelRunner:
    """Owns the weights and the KV cache."""

    def __init__(self, model_config: ModelConfig, config: EngineConfig) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.device = resolve_device(config.device)
        self.dtype = resolve_dtype(config.dtype, model_config.checkpoint_dtype, self.device)
        self.vocab_size = model_config.vocab_size
        self.num_blocks = config.num_gpu_blocks_override or num_blocks_in(
            config.kv_cache_memory_bytes, model_config, config.block_size, self.dtype
        )
        self._model = load_model(model_config, config, self.dtype, self.device)
        self._model.prepack()
        shape = (
            2,
            model_config.num_hidden_layers,
            self.num_blocks,
            config.block_size,
            model_config.num_key_value_heads,
            model_config.head_dim,
        )
        # Zeros, not empty: a stale NaN in an unwritten slot would pass through a mask as 0 × NaN.
        self._kv_cache = zeros(shape, self.dtype, self.device)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> Tensor:
        """Compute the batch's tokens; returns the logits of its `last_token_index`: [num_sampling, vocab] float32."""
        hidden = self._model.forward(batch.token_ids, batch.positions, self._kv_cache, batch.slots, batch.attention)
        return self._model.logits(hidden[batch.last_token_index])


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zero tensor; on the CPU its pages take no memory before they are written (calloc, which torch does not use)."""
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(numpy.zeros(num_bytes, dtype=numpy.uint8)).view(dtype).view(tuple(shape))


def block_bytes(model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes one KV block takes over all layers, keys and values."""
    per_token = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * dtype.itemsize
    return per_token * block_size


def num_blocks_in(memory_bytes: int, model: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """How many KV blocks fit. Raises `ConfigError` when not even one does."""
    size = block_bytes(model, block_size, dtype)
    if memory_bytes < size:
        raise ConfigError(f"kv_cache_memory_bytes={memory_bytes} is less than one KV block of {size} bytes")
    return memory_bytes // size


def resolve_device(device: str) -> torch.device:
    """ "auto" is CUDA where there is a GPU, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} was asked for, but torch finds no CUDA GPU here")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu or cuda, not {device!r}") from error


def resolve_dtype(dtype: str, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """ "auto" is the checkpoint's own dtype, or float32 where the CPU has no arithmetic for it."""
    if dtype != "auto":
        return _named_dtype(dtype)
    own = _named_dtype(checkpoint_dtype)
    if device.type == "cpu" and not _cpu_computes(own):
        return torch.float32
    return own


def _named_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"unknown dtype {name!r} in config.json")
    return dtype


def _cpu_computes(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return dtype == torch.float32
