"""LoRA adapters as PEFT saves them, and what a model is once one is merged into it."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
LATENT_ATTENTION = ("q_b_proj", "q_a_proj", "kv_a_proj_with_mqa", "o_proj")
LAYER_INPUTS = ("per_layer_input_gate", "per_layer_projection")
SHORT_CONVS = ("in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "w1", "w2", "w3")
LINEAR_ATTENTION = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
# Beside those that are called as attention's and MLPs' are.
OF_STATES = {
    "qwen3.5": LINEAR_ATTENTION,
    "falcon-h1": ("in_proj", "out_proj"),
    "olmo-hybrid": ("g_proj", "b_proj", "a_proj"),
}


def save_adapter(
    model: Path,
    folder: Path,
    *,
    targets: tuple[str, ...] = ATTENTION + MLP,
    rank: int = 4,
    alpha: float = 8.0,
    seed: int = 0,
    **config: Any,
) -> Path:
    """A random adapter for the model in a folder, strong enough to change nearly every answer."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, (num_outputs, num_inputs) in _projections(model, targets).items():
        for side, shape in {"A": (rank, num_inputs), "B": (num_outputs, rank)}.items():
            drawn = torch.randn(shape, generator=generator) * num_inputs**-0.5
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = drawn
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
        "lora_dropout": 0.05,
        **config,
    }
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder


@torch.no_grad()
def merged(model: Any, folder: Path) -> Any:
    """A transformers model as PEFT's `merge_and_unload` has it: W + scale · B · A."""
    config = json.loads((folder / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])
    tensors, adapted = load_file(folder / "adapter_model.safetensors"), copy.deepcopy(model)
    for name, module in adapted.named_modules():
        if name.rpartition(".")[2] in config["target_modules"] and ".vision_tower." not in name:
            down, up = (tensors[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
            module.weight += scale * up @ down
    return adapted


def _projections(model: Path, targets: tuple[str, ...]) -> dict[str, list[int]]:
    """Their shapes, by their names in the model's checkpoint."""
    with safe_open(model / "model.safetensors", "pt") as tensors:
        shapes = {name.removesuffix(".weight"): tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    return {
        name: shape
        for name, shape in shapes.items()
        if name.rpartition(".")[2] in targets and not name.startswith("vision_tower.")
    }
