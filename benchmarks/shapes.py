"""Models of published shapes with random weights: speed does not read them."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from report import ROOT
from safetensors.torch import save_file

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.models import load_model

FOLDER: Path = ROOT / "out" / "bench"


@dataclass(frozen=True)
class Shape:
    """A `config.json`, and whose shape it is."""

    name: str
    config: dict[str, Any]


_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
}
SHAPES = {
    "M1": Shape(
        "SmolLM2-135M",
        {
            **_LLAMA,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
            "rope_theta": 100000.0,
        },
    ),
    "M2": Shape(
        "Qwen2.5-0.5B",
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "bos_token_id": 151643,
            "eos_token_id": 151643,
            "torch_dtype": "bfloat16",
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "max_position_embeddings": 32768,
            "rope_theta": 1000000.0,
        },
    ),
    "M3": Shape(
        "Qwen3.5-0.8B",
        {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "bos_token_id": None,
            "eos_token_id": 248044,
            "dtype": "bfloat16",
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "layer_types": [*["linear_attention"] * 3, "full_attention"] * 6,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "vocab_size": 248320,
            "max_position_embeddings": 32768,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e7,
                "partial_rotary_factor": 0.25,
                "mrope_section": [11, 11, 10],
                "mrope_interleaved": True,
            },
        },
    ),
    "draft": Shape(
        "a draft model for M1, a twelfth of its size",
        {
            **_LLAMA,
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "vocab_size": 49152,
            "max_position_embeddings": 8192,
            "rope_theta": 100000.0,
        },
    ),
    "gate": Shape(
        "a small one for the correctness gate",
        {
            **_LLAMA,
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "vocab_size": 4096,
            "max_position_embeddings": 1024,
            "rope_theta": 100000.0,
        },
    ),
}


def checkpoint(name: str) -> Path:
    """The folder of a shape's checkpoint (bfloat16, seed 0), written on first use: every engine loads the same."""
    folder = FOLDER / name
    config = json.dumps(SHAPES[name].config, indent=2)
    file = folder / "config.json"
    if file.is_file() and file.read_text(encoding="utf-8") == config and (folder / "model.safetensors").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(config, encoding="utf-8")
    _write_weights(folder)
    return folder


def _write_weights(folder: Path) -> None:
    options = EngineConfig(load_format="dummy", seed=0)
    model = load_model(ModelConfig.from_pretrained(folder), options, torch.bfloat16, torch.device("cpu"))
    tensors = {slot.name: slot.stored() for slot in model.weight_slots()}
    # Renamed when complete: an interrupted run leaves no file that looks whole.
    partial = folder / "model.safetensors.tmp"
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, folder / "model.safetensors")
