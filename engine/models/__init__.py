"""Decoders of all supported families: shared building blocks, and a layer for each way to stand its parts."""

from collections.abc import Mapping
from dataclasses import replace

import torch

from ...kernels.linear import supports_grouped
from ..checkpoints.gguf.config import read_cpu_quantization
from ..checkpoints.gguf.file import is_gguf
from ..checkpoints.model_config import ModelConfig
from ..checkpoints.quantization_config import read_quantization
from ..checkpoints.quantization_schemes import QuantizationConfig
from ..checkpoints.weights import WeightSlot
from ..config import EngineConfig
from ..sharding.ranks import ALONE, Ranks
from .blocks import LinearPart
from .decoder import Decoder
from .falcon import FalconLayer
from .falcon_h1 import FalconH1Layer
from .gemma import GemmaLayer
from .gemma4 import Gemma4Layer
from .gpt_oss import GptOssLayer
from .layer import NewLayer
from .llama import LlamaLayer, ParallelLayer
from .nemotron_h import NemotronHLayer
from .olmo import OlmoLayer, new_olmo_hybrid_layer

# Tensors there have a shape and no memory.
_NOWHERE = torch.device("meta")
_LAYERS: dict[str, NewLayer] = {
    "llama": LlamaLayer,
    "gemma": GemmaLayer,
    "gemma4": Gemma4Layer,
    "nemotron_h": NemotronHLayer,
    "falcon": FalconLayer,
    "falcon_h1": FalconH1Layer,
    "olmo": OlmoLayer,
    "olmo_hybrid": new_olmo_hybrid_layer,
    "parallel": ParallelLayer,
    "gpt-oss": GptOssLayer,
}


def load_model(
    config: ModelConfig, options: EngineConfig, dtype: torch.dtype, device: torch.device, ranks: Ranks = ALONE
) -> Decoder:
    """The model with the weights of its checkpoint, or random ones where `options.load_format` is "dummy".

    `ranks`: of which this process is one and has a share. Raises `ModelError` when the checkpoint's weights do not fit
    the config, and `ConfigError` when the model cannot be shared so.
    """
    if is_gguf(config.path) and (options.load_format == "dummy" or device.type == "cpu"):
        keeps = _keeps_blocks(options, dtype, device, ranks)
        config = replace(config, quantization=_cpu_quantization(config) if keeps else None)
    max_model_len = options.longest_sequence(config.max_position_embeddings)
    make_layer = _LAYERS[config.decoder_layer]
    model = Decoder(config, max_model_len, make_layer, dtype, device, ranks)
    whole = _outline(Decoder(config, 1, make_layer, dtype, _NOWHERE)) if ranks.num_stages > 1 else []
    if options.load_format == "dummy":
        model.draw(options.seed, whole)
    else:
        model.load(elsewhere=[name for slot in whole for name in slot.names])
    return model


def whole_parts(config: ModelConfig, dtype: torch.dtype) -> Mapping[str, LinearPart]:
    """The projections of a model that nobody shares, by their names: how large they are, without memory."""
    return Decoder(replace(config, quantization=None), 1, _LAYERS[config.decoder_layer], dtype, _NOWHERE).parts


def _outline(model: Decoder) -> list[WeightSlot]:
    """All its weights without memory. The quantised ones of a model that is nowhere wait on the host."""
    return [replace(slot, destination=slot.destination.to(_NOWHERE)) for slot in model.weight_slots()]


def _keeps_blocks(options: EngineConfig, dtype: torch.dtype, device: torch.device, ranks: Ranks) -> bool:
    """Whether a GGUF file's blocks are multiplied as they are on a CPU.

    Ranks may cut within blocks, random bits are none, and what is to be int8 is quantised anew.
    """
    is_plain = options.load_format != "dummy" and options.quantization is None
    return is_plain and supports_grouped(dtype, device) and ranks.size == 1


def _cpu_quantization(config: ModelConfig) -> QuantizationConfig | None:
    """What of a GGUF file a CPU's kernels take as it is."""
    return read_quantization(read_cpu_quantization(config.path))


__all__ = ["Decoder", "load_model", "whole_parts"]
