"""One file an architecture family, and the registry that finds it."""

import torch

from ..config import EngineConfig, ModelConfig
from .llama import LlamaModel

_FAMILIES = {
    "LlamaForCausalLM": LlamaModel,
    "MistralForCausalLM": LlamaModel,
    "Qwen2ForCausalLM": LlamaModel,
    "Qwen3ForCausalLM": LlamaModel,
}


def load_model(config: ModelConfig, options: EngineConfig, dtype: torch.dtype, device: torch.device) -> LlamaModel:
    """The model with the weights of its checkpoint, or random ones where `options.load_format` is "dummy".

    Raises `ModelError` when the checkpoint's weights do not fit the config.
    """
    model = _FAMILIES[config.architecture](config, dtype, device)
    if options.load_format == "dummy":
        model.draw(options.seed)
    else:
        model.load(config.path)
    return model


__all__ = ["LlamaModel", "load_model"]
