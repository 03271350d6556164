"""One step on the device: the model, its KV cache, and where they live."""

import torch
from torch import Tensor

from ..kernels.linear import supports_int8
from .batch import Batch
from .config import EngineConfig
from .errors import ConfigError
from .host_memory import keep_freed_memory
from .kv_memory import KVMemory, num_blocks_in
from .model_config import ModelConfig
from .models import load_model
from .quantization.config import QuantizationConfig
from .swap import PreemptionCosts


class ModelRunner:
    """Owns the weights and the KV cache."""

    def __init__(self, model_config: ModelConfig, config: EngineConfig) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.device = resolve_device(config.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.dtype = resolve_dtype(config.dtype, model_config.checkpoint_dtype, self.device)
        require_quantization(config.quantization, self.dtype, self.device, model_config.quantization)
        self.vocab_size = model_config.vocab_size
        windows = model_config.sliding_windows
        self.sliding_window = None if None in windows else max(window for window in windows if window is not None)
        num_blocks = config.num_gpu_blocks_override or num_blocks_in(
            config.kv_cache_memory_bytes, model_config, config.block_size, self.dtype
        )
        self._model = load_model(model_config, config, self.dtype, self.device)
        self.preemption_costs = preemption_costs(self._model.num_parameters, self.device)
        self._model.prepack(config.quantization)
        self.memory = KVMemory(model_config, num_blocks, config.block_size, self.dtype, self.device)

    @torch.inference_mode()
    def execute(self, batch: Batch) -> Tensor:
        """Compute the batch's tokens; returns the logits of its `last_token_index`: [num_sampling, vocab].

        Its prompt reader, if it has one, is shown the logits it wants.
        """
        hidden = self._model.forward(batch.token_ids, batch.positions, self.memory.cache, batch.slots, batch.attention)
        if batch.prompt_reader is not None:
            batch.prompt_reader.read(lambda index: self._model.logits(hidden[index]), self.vocab_size, self.device)
        return self._model.logits(hidden[batch.last_token_index])


def preemption_costs(num_parameters: int, device: torch.device) -> PreemptionCosts:
    """What it takes to get KV back on such a device, to within a factor of two or so.

    Rates that models reach in prefill and copies of scattered blocks over PCIe 5, and on two CPU cores.
    """
    flops_per_second, bytes_per_second = (3e14, 2e10) if device.type == "cuda" else (3e11, 5e9)
    return PreemptionCosts(
        seconds_per_token=2 * num_parameters / flops_per_second,
        seconds_per_byte=1 / bytes_per_second,
        seconds_per_swap=1e-4,
    )


def require_quantization(
    quantization: str | None, dtype: torch.dtype, device: torch.device, checkpoint: QuantizationConfig | None = None
) -> None:
    """Raises `ConfigError` where int8 would be computed the long way round, or the checkpoint is quantised already.

    Whoever asks for it wants speed: a model many times slower is a worse answer than one line that says why.
    """
    if quantization is not None and checkpoint is not None:
        raise ConfigError(
            f"quantization {quantization} is for weights as they were trained, and the checkpoint's are quantised "
            f"({checkpoint.method}): leave it out"
        )
    if quantization == "int8" and not supports_int8(dtype, device):
        raise ConfigError(
            "quantization int8 needs the compiled kernels, a CPU with AVX-512, VNNI and bfloat16, and dtype bfloat16 "
            f"or float32; here are {device.type} and {str(dtype).removeprefix('torch.')}: leave it out"
        )


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
