"""Lists of modules have the names that a model's had where it was quantised, which differ from those of its files."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Gemma3Config, Gemma4Config, Mistral3Config, Qwen2_5_VLConfig, Qwen3_5Config, Qwen3VLConfig

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.checkpoints.other_names import LLAVA_NAMES, NESTED_NAMES, QWEN2_VL_NAMES, OtherNames
from headrace.engine.checkpoints.quantization_schemes import QuantizationConfig

from .quantization_configs import AWQ, BYTE, GPTQ, INT4, MODELOPT, NVFP4, compressed

CONFIGS: dict[str, Any] = {
    "Gemma3": Gemma3Config(vision_config={"patch_size": 14}),
    "Gemma4": Gemma4Config(),
    "Mistral3": Mistral3Config(),
    "Qwen2_5_VL": Qwen2_5_VLConfig(
        text_config={"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
        vision_config={"out_hidden_size": 8192},
    ),
    "Qwen3VL": Qwen3VLConfig(vision_config={"out_hidden_size": 4096}),
    "Qwen3_5": Qwen3_5Config(vision_config={"out_hidden_size": 4096}),
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
DOWN = "LAYERS.0.mlp.down_proj"
# Of the first layer one projection is left out, as those that quantise write it.
LEFT_OUT: list[dict[str, Any]] = [
    compressed("float-quantized", BYTE, ["lm_head", DOWN, "model.vision_tower.encoder.layers.0.mlp.fc1"]),
    compressed("pack-quantized", INT4, ["re:.*lm_head", r"re:LAYERS\.0\.mlp\.down.*", "re:.*vision_tower.*"]),
    {**GPTQ, "dynamic": {"lm_head": {}, r"-:LAYERS\.0\.mlp\.down": {}, "-:.*visual.*": {}}},
    {**AWQ, "modules_to_not_convert": ["visual", "vision_tower", DOWN]},
    {**FP8, "modules_to_not_convert": ["lm_head", "model.visual", DOWN]},
    {**FP8, "ignored_layers": [DOWN]},
    {**NVFP4, "ignore": ["lm_head", "model.vision_tower*", "LAYERS.0.mlp.down*"]},
]
# It is the only layer that is quantised.
MIXED: list[dict[str, Any]] = [
    compressed(
        "pack-quantized",
        INT4,
        [],
        config_groups={"group_0": {"targets": [r"re:^LAYERS\.0\..*proj$"], "weights": INT4}},
    ),
    {**MODELOPT, "quant_algo": "MIXED_PRECISION", "quantized_layers": {"LAYERS.0.mlp": {"quant_algo": "FP8"}}},
]


def read(folder: Path, family: str, quantization: dict[str, Any], layers: str) -> tuple[str, QuantizationConfig]:
    """What a model's layers are called, and how it is quantised."""
    written = json.loads(json.dumps(quantization).replace("LAYERS", layers))
    raw = CONFIGS[family].to_dict()
    architecture = f"{family}ForConditionalGeneration"
    (folder / "config.json").write_text(
        json.dumps(raw | {"architectures": [architecture], "quantization_config": written})
    )
    config = ModelConfig.from_pretrained(folder)
    assert config.quantization is not None
    # Of the last one's lists a head has no other name.
    assert config.quantization.scheme([config.names.head]) is None
    return config.names.layers, config.quantization


# As transformers from 4.52 on calls them, and as it did before, and vLLM does.
@pytest.mark.parametrize("layers", ["model.language_model.layers", "language_model.model.layers"])
@pytest.mark.parametrize("family", CONFIGS)
def test_a_layer_that_a_list_names(family, layers, tmp_path):
    for quantization in LEFT_OUT:
        prefix, found = read(tmp_path, family, quantization, layers)
        assert found.scheme([f"{prefix}.0.mlp.down_proj"]) is None
        assert found.scheme([f"{prefix}.0.mlp.up_proj", f"{prefix}.1.mlp.down_proj"]) is not None
    for quantization in MIXED:
        prefix, found = read(tmp_path, family, quantization, layers)
        assert found.scheme([f"{prefix}.0.mlp.up_proj"]) is not None
        assert found.scheme([f"{prefix}.1.mlp.up_proj"]) is None


def test_parts_of_names_are_not_taken_for_names():
    assert LLAVA_NAMES.here("lm_head_norm.weight") == "lm_head_norm.weight"
    assert LLAVA_NAMES.anywhere("language_model.modelling") == ["language_model.modelling"]
    assert set(LLAVA_NAMES.anywhere("vision_tower.encoder")) == {
        "vision_tower.encoder",
        "vision_tower.vision_model.encoder",
        "model.vision_tower.encoder",
        "model.vision_tower.vision_model.encoder",
    }


@pytest.mark.parametrize(
    ("names", "here", "others"),
    [
        (LLAVA_NAMES, "language_model.lm_head", ["lm_head"]),
        (LLAVA_NAMES, "multi_modal_projector.linear_1", ["model.multi_modal_projector.linear_1"]),
        (QWEN2_VL_NAMES, "lm_head", ["language_model.lm_head"]),
        (QWEN2_VL_NAMES, "visual.merger", ["model.visual.merger"]),
        (NESTED_NAMES, "lm_head", ["language_model.lm_head"]),
        (NESTED_NAMES, "model.visual.merger", ["visual.merger"]),
        (NESTED_NAMES, "model.vision_tower.patch_embedder", ["vision_tower.patch_embedder"]),
        (NESTED_NAMES, "model.embed_vision.embedding", ["embed_vision.embedding"]),
    ],
)
def test_what_is_beside_the_layers(names: OtherNames, here: str, others: list[str]):
    assert {here, *others} <= set(names.anywhere(here))
    assert {names.here(each) for each in others} == {here}
