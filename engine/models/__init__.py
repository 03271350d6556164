"""One file an architecture family, and the registry that finds it."""

import torch

from ..config import ModelConfig
from .llama import LlamaModel

_FAMILIES = {
    "LlamaForCausalLM": LlamaModel,
    "MistralForCausalLM": LlamaModel,
    "Qwen2ForCausalLM": LlamaModel,
    "Qwen3ForCausalLM": LlamaModel,
}


def load_model(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LlamaModel:
    """The model with its checkpoint's weights. Raises `ModelError` when the weights do not fit the config."""
    model = _FAMILIES[config.architecture](config, dtype, device)
    model.load(config.path)
    return model


__all__ = ["LlamaModel", "load_model"]
