"""A model's size by its description is that of what is loaded."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.checkpoints.model_size import kv_token_bytes, num_parameters, weight_bytes
from headrace.engine.checkpoints.projection import Projection
from headrace.engine.checkpoints.quantization_schemes import Int4Scheme
from headrace.engine.config import EngineConfig
from headrace.engine.kv_cache.kv_memory import block_bytes
from headrace.engine.models import load_model
from headrace.kernels.linear.weights import Int4Weight

from ..families import FAMILIES, FURTHER, WITH_STATES

GROUPS = {"bits": 4, "group_size": 32}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
QUANTIZED: dict[str, dict[str, Any]] = {
    "gptq": {"quant_method": "gptq", "sym": True, "desc_act": False, **GROUPS},
    "awq": {"quant_method": "awq", "zero_point": True, "version": "gemm", **GROUPS},
    "fp8": FP8,
    "fp8 in blocks": FP8 | {"weight_block_size": [32, 32]},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
}


def described(config: Any, folder: Path, **changes: Any) -> ModelConfig:
    """A model of which there is nothing but its description."""
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__
    (folder / "config.json").write_text(json.dumps(config.to_dict() | {"architectures": [architecture]} | changes))
    return ModelConfig.from_pretrained(folder)


def loaded_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """What a checkpoint's tensors take once they are loaded; which group an input belongs to is as good as nothing."""
    model = load_model(config, EngineConfig(load_format="dummy"), dtype, torch.device("cpu"))
    slots = {slot.name: slot.destination for slot in model.weight_slots() if not slot.name.endswith("g_idx")}
    return sum(each.numel() * each.element_size() for each in slots.values())


@pytest.mark.parametrize("family", [*FAMILIES, *FURTHER, *WITH_STATES])
def test_of_each_family(tmp_path: Path, family: str) -> None:
    config = described((FAMILIES | FURTHER | WITH_STATES)[family], tmp_path)
    assert weight_bytes(config, 2) == loaded_bytes(config, torch.bfloat16)
    assert weight_bytes(config, 4) == loaded_bytes(config, torch.float32) == 4 * num_parameters(config)
    assert kv_token_bytes(config, 2) * 16 == block_bytes(config, 16, torch.bfloat16)


@pytest.mark.parametrize("scheme", QUANTIZED.values(), ids=QUANTIZED)
def test_of_quantised_checkpoints(tmp_path: Path, scheme: dict[str, Any]) -> None:
    sizes = FAMILIES["llama"].to_dict() | {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16}
    plain = described(LlamaConfig(**sizes | {"num_attention_heads": 4}), tmp_path)
    config = described(LlamaConfig(**sizes | {"num_attention_heads": 4}), tmp_path, quantization_config=scheme)
    # The scales of four bits are read as float32.
    assert weight_bytes(config, 2) == pytest.approx(loaded_bytes(config, torch.bfloat16), rel=0.06)
    assert weight_bytes(config, 2) < 0.7 * weight_bytes(plain, 2)
    assert num_parameters(config) == num_parameters(plain)


@pytest.mark.parametrize(
    ("layout", "group_size", "zeros"), [("awq", 32, torch.uint8), ("gptq", None, torch.uint8), ("Q4_K", 32, torch.half)]
)
def test_of_four_bits_as_they_are_kept(layout: Any, group_size: int | None, zeros: torch.dtype) -> None:
    num_groups, size = 128 // (group_size or 128), group_size or 128
    groups = torch.ones(num_groups, 8, dtype=torch.half)
    kept = Int4Weight.pack(torch.zeros(8, 128, dtype=torch.uint8), groups, groups.to(zeros), size)
    num_bytes = sum(each.numel() * each.element_size() for each in (kept.packed, kept.scales, kept.zeros))
    projection = Projection("q_proj", num_outputs=8, num_inputs=128)
    assert projection.num_bytes(Int4Scheme(layout, group_size, is_symmetric=False), 2) == num_bytes


def test_of_weights_that_are_quantised_as_they_are_loaded(tmp_path: Path) -> None:
    config = described(LlamaConfig(**FAMILIES["llama"].to_dict() | {"num_hidden_layers": 50}), tmp_path)
    assert 0.5 < weight_bytes(config, 2, "int8") / weight_bytes(config, 2) < 0.62


def test_of_shared_experts_that_are_left_as_they_were(tmp_path: Path) -> None:
    """They go by the name that their family has for them."""
    left_out = FP8 | {"modules_to_not_convert": ["shared_mlp"]}
    config = described(FURTHER["hunyuan-moe"], tmp_path, quantization_config=left_out)
    # Beside what is counted there are a few scales of a cache in FP8.
    assert weight_bytes(config, 4) == pytest.approx(loaded_bytes(config, torch.float32), rel=0.005)
