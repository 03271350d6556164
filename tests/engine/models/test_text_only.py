"""Models that read images too, asked about text alone: against transformers, with the names that are on disk."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText, Gemma3Config, Gemma4Config, Mistral3Config

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.checkpoints.model_shape import LayerInputsConfig
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.errors import ModelError
from headrace.engine.request import Request

from ..conftest import greedy, save_random_model
from ..families import FAMILIES, ODD_SIZES
from ..running import greedy_params, run_all, token_ids

PROMPT = [(7 * place * place + 3) % 300 for place in range(33)]
EYES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGES = {"image_size": 28, "patch_size": 14}
# Queries grow from position 32 on, and again at 64.
GROWING = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
    "mscale": 2.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
CONFIGS: dict[str, Any] = {
    "gemma3": Gemma3Config(
        text_config=FAMILIES["gemma3"].to_dict(),
        vision_config={**EYES, **IMAGES},
        mm_tokens_per_image=4,
        image_token_index=300,
        tie_word_embeddings=False,
    ),
    "gemma4": Gemma4Config(
        text_config=FAMILIES["gemma4-small"].to_dict(),
        vision_config={
            **{name: size for name, size in EYES.items() if name != "num_attention_heads"},
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
        },
        image_token_id=300,
        tie_word_embeddings=False,
    ),
    "mistral3": Mistral3Config(
        text_config={"model_type": "mistral", "head_dim": 20, **ODD_SIZES},
        vision_config={"model_type": "pixtral", **EYES, **IMAGES},
        image_token_index=300,
        tie_word_embeddings=False,
    ),
    "ministral3": Mistral3Config(
        text_config={"model_type": "ministral3", "head_dim": 20, **ODD_SIZES, "rope_parameters": GROWING},
        vision_config={"model_type": "pixtral", **EYES, **IMAGES},
        image_token_index=300,
        tie_word_embeddings=False,
    ),
    "mistral4": Mistral3Config(
        text_config={
            **FAMILIES["mistral4"].to_dict(),
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "q_lora_rank": None,
            # transformers writes into it.
            "rope_parameters": {**GROWING},
        },
        vision_config={"model_type": "pixtral", **EYES, **IMAGES},
        image_token_index=300,
        tie_word_embeddings=False,
    ),
}


def generated(folder: Path) -> list[int]:
    options = EngineConfig(num_gpu_blocks_override=100, max_model_len=150, block_size=8, max_num_batched_tokens=13)
    engine = Engine.from_pretrained(folder, options)
    return token_ids(run_all(engine, [Request("r", PROMPT, greedy_params())])["r"])


def changed(folder: Path, **fields: Any) -> None:
    """Other fields in the `text_config`; None: left out."""
    raw = json.loads((folder / "config.json").read_text())
    text = raw["text_config"] | fields
    raw["text_config"] = {name: value for name, value in text.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("kind", CONFIGS)
def test_text_is_answered_as_transformers_does(kind, tmp_path):
    model = save_random_model(CONFIGS[kind], tmp_path, AutoModelForImageTextToText)
    expected = greedy(model, PROMPT)
    assert len(set(expected)) > 10
    assert generated(tmp_path) == expected


def test_keys_that_layers_of_gemma_4_do_not_use_are_passed_over(tmp_path):
    model = save_random_model(CONFIGS["gemma4"], tmp_path, AutoModelForImageTextToText)
    tensors = load_file(tmp_path / "model.safetensors")
    attention, shared = (f"model.language_model.layers.{layer}.self_attn" for layer in (2, 4))
    for part in ("k_proj", "v_proj", "k_norm"):
        assert f"{shared}.{part}.weight" not in tensors
        tensors[f"{shared}.{part}.weight"] = tensors[f"{attention}.{part}.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert generated(tmp_path) == greedy(model, PROMPT)


def test_what_the_smallest_gemma_leaves_out(tmp_path):
    """The published config.json of Gemma 3 4B says no more of its decoder than this."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"torch_dtype": "bfloat16"}))
    config = ModelConfig.from_pretrained(tmp_path)
    published = Gemma3Config(text_config=text).text_config
    assert config.vocab_size == published.vocab_size == 262_208
    assert config.num_attention_heads == published.num_attention_heads == 8
    assert config.num_key_value_heads == published.num_key_value_heads == 4
    assert config.head_dim == published.head_dim == 256
    assert config.max_position_embeddings == published.max_position_embeddings == 131_072
    assert config.tie_word_embeddings
    assert config.checkpoint_dtype == "bfloat16"
    assert config.eos_token_ids == (1, 106)
    assert config.sliding_windows[:6] == (1024, 1024, 1024, 1024, 1024, None)
    assert [(rope.theta, rope.rope_type, rope.factor) for rope in config.ropes[4:6]] == [
        (1e4, "default", 1.0),
        (1e6, "linear", 8.0),
    ]


def test_what_gemma_4_may_leave_out(tmp_path):
    text = {"model_type": "gemma4_text", "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 12}
    raw = {"architectures": ["Gemma4ForConditionalGeneration"], "eos_token_id": [1, 106], "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config, published = ModelConfig.from_pretrained(tmp_path), Gemma4Config(text_config=text).text_config
    assert config.vocab_size == published.vocab_size == 262_144
    assert config.num_attention_heads == published.num_attention_heads == 8
    assert config.max_position_embeddings == published.max_position_embeddings == 131_072
    assert config.tie_word_embeddings
    assert [(sizes.num_key_value_heads, sizes.head_dim) for sizes in config.layers[4:6]] == [(4, 256), (4, 512)]
    assert config.sliding_windows == ((published.sliding_window,) * 5 + (None,)) * 2
    assert config.layer_inputs == LayerInputsConfig(256, 262_144)
    assert [(rope.theta, rope.rope_type, rope.turning_share) for rope in config.ropes[4:6]] == [
        (1e4, "default", 1.0),
        (1e6, "proportional", 0.25),
    ]
    # transformers writes zeros before the numbers of layers.
    assert set(published.to_dict()["per_layer_config"]) == {"05", "11"}
    (tmp_path / "config.json").write_text(json.dumps(raw | {"text_config": published.to_dict()}))
    assert ModelConfig.from_pretrained(tmp_path).layers == config.layers


def test_decoders_that_are_not_known(tmp_path):
    save_random_model(CONFIGS["mistral3"], tmp_path, AutoModelForImageTextToText)
    changed(tmp_path, model_type="mistral5")
    with pytest.raises(
        ModelError, match=r"text_config.model_type 'mistral5'; supported: mistral, ministral3, mistral4"
    ):
        ModelConfig.from_pretrained(tmp_path)


def test_a_head_that_the_config_says_is_tied_is_not_left_out(tmp_path):
    """transformers 5 writes so of Mistral Small, whose head is a matrix of its own."""
    save_random_model(CONFIGS["mistral3"], tmp_path, AutoModelForImageTextToText)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": True}))
    with pytest.raises(ModelError, match=r"holds a tensor language_model\.lm_head\.weight"):
        generated(tmp_path)


def test_a_tensor_that_is_there_by_two_names(tmp_path):
    save_random_model(CONFIGS["mistral3"], tmp_path, AutoModelForImageTextToText)
    tensors = load_file(tmp_path / "model.safetensors")
    here, there = (f"{prefix}.norm.weight" for prefix in ("language_model.model", "model.language_model"))
    save_file(tensors | {there: tensors[here] + 1}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=f"holds the tensors {here} and {there}, which are the same one"):
        generated(tmp_path)


def test_tensors_under_other_names_are_not_passed_over(tmp_path):
    save_random_model(CONFIGS["mistral3"], tmp_path, AutoModelForImageTextToText)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["audio_tower.weight"] = tensors["multi_modal_projector.linear_1.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"holds a tensor audio_tower\.weight"):
        generated(tmp_path)
