"""Decoders of all supported families: shared building blocks, and a layer for each way to stand the norms."""

import torch

from ..checkpoints.model_config import ModelConfig
from ..config import EngineConfig
from .decoder import Decoder, MakeLayer
from .gemma import GemmaLayer
from .llama import LlamaLayer

_LAYERS: dict[str, MakeLayer] = {"llama": LlamaLayer, "gemma": GemmaLayer}


def load_model(config: ModelConfig, options: EngineConfig, dtype: torch.dtype, device: torch.device) -> Decoder:
    """The model with the weights of its checkpoint, or random ones where `options.load_format` is "dummy".

    Raises `ModelError` when the checkpoint's weights do not fit the config.
    """
    max_model_len = options.max_model_len or config.max_position_embeddings
    model = Decoder(config, max_model_len, _LAYERS[config.decoder_layer], dtype, device)
    if options.load_format == "dummy":
        model.draw(options.seed)
    else:
        model.load()
    return model


__all__ = ["Decoder", "load_model"]
