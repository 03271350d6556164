"""`convert_vllm.py CHECKPOINT PRECISION FOLDER`: the checkpoint itself, or for int8 as one of compressed-tensors.

Weights of linear layers in 8 bits with a scale for each output; activations are rounded token by token when it runs.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file


def _eight_bits(strategy: str, dynamic: bool) -> dict[str, Any]:
    return {"num_bits": 8, "type": "int", "symmetric": True, "strategy": strategy, "dynamic": dynamic}


QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _eight_bits("channel", dynamic=False),
            "input_activations": _eight_bits("token", dynamic=True),
        }
    },
}


def quantized(tensors: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            scale = tensor.float().abs().amax(1, keepdim=True) / 127
            found[name] = (tensor.float() / scale).round().char()
            found[f"{name}_scale"] = scale
        else:
            found[name] = tensor
    return found


def main(checkpoint: str, precision: str, folder: str) -> None:
    source, target = Path(checkpoint), Path(folder)
    target.mkdir()
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if precision == "int8":
        config["quantization_config"] = QUANTIZATION
        save_file(quantized(load_file(source / "model.safetensors")), target / "model.safetensors", {"format": "pt"})
    else:
        os.link(source / "model.safetensors", target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
