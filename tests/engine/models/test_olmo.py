"""OLMo 2, which OLMo 3 adds windows to, OLMo 3 as its first configs say it, and OLMo Hybrid as it is published.

OLMo 3 itself is among the families, OLMo Hybrid among those with states.
"""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Olmo2Config

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.checkpoints.model_size import num_parameters, state_bytes
from headrace.engine.checkpoints.state_layers import GatedDeltaNetConfig
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.errors import ConfigError, ModelError
from headrace.engine.request import Request
from headrace.engine.sharding.shares import require_splittable

from ..conftest import NUM_NEW_TOKENS, greedy, save_random_model
from ..families import ODD_SIZES, PHI3_TOKENS
from ..parallel.sharing import FROM_FILE, assert_close, logits_of, shared_logits
from ..running import greedy_params, run_all, token_ids

# Its norms make all layers' outputs as large as each other: beside them its embeddings must not be small.
SIZES = {**ODD_SIZES, **PHI3_TOKENS, "initializer_range": 0.5}


def test_olmo_2_answers_as_transformers(tmp_path):
    model = save_random_model(Olmo2Config(**SIZES, attention_bias=True), tmp_path)
    options = EngineConfig(num_gpu_blocks_override=100, max_model_len=150, block_size=8, max_num_batched_tokens=13)
    engine = Engine.from_pretrained(tmp_path, options)
    prompts = {length: [(7 * place * place + 3) % 300 for place in range(length)] for length in (1, 30, 61)}
    requests = [Request(str(length), prompt, greedy_params(NUM_NEW_TOKENS)) for length, prompt in prompts.items()]
    events = run_all(engine, requests)
    for length, prompt in prompts.items():
        expected = greedy(model, prompt)
        assert len(set(expected)) > 10
        assert token_ids(events[str(length)]) == expected


def test_only_layers_without_a_window_are_stretched(checkpoint, tmp_path):
    """As the first configs say it: one `rope_scaling`, and no `layer_types`."""
    found = ModelConfig.from_pretrained(folder := checkpoint("olmo3").folder)
    raw = json.loads((folder / "config.json").read_text())
    ropes = raw.pop("rope_parameters")
    scaling = {name: value for name, value in ropes["full_attention"].items() if name != "rope_theta"}
    older = raw | {"rope_theta": 10000.0, "rope_scaling": scaling, "num_hidden_layers": 4, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(older))
    config = ModelConfig.from_pretrained(tmp_path)
    local, full = found.ropes[:2]
    assert full.rope_type == "yarn"
    assert config.ropes == (local, local, local, full)
    assert config.sliding_windows == (21, 21, 21, None)
    assert config.max_position_embeddings == found.max_position_embeddings == 256


def test_norms_over_all_heads_cannot_be_shared(checkpoint):
    config = ModelConfig.from_pretrained(checkpoint("olmo3").folder)
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size=2 is not supported for .*, whose .* norms over all heads"
    ):
        require_splittable(config, 2)


# As it is published, where transformers takes all else for the same.
OLMO_HYBRID_7B: dict[str, Any] = {
    "architectures": ["OlmoHybridForCausalLM"],
    "eos_token_id": 100257,
    "hidden_size": 3840,
    "intermediate_size": 11008,
    "max_position_embeddings": 65536,
    "num_attention_heads": 30,
    "num_hidden_layers": 32,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"},
    "vocab_size": 100352,
}


def test_olmo_hybrid_as_it_is_published(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(OLMO_HYBRID_7B))
    config = ModelConfig.from_pretrained(tmp_path)
    assert num_parameters(config) == 7_430_870_688
    assert state_bytes(config, 2) == 24 * (3 * 30 * (2 * 96 + 192) * 2 + 30 * 96 * 192 * 4)
    assert [config.has_state(layer) for layer in range(5)] == [True, True, True, False, True]
    assert {rope.rope_type for rope in config.ropes} == {"none"}
    assert isinstance(config.state_layers, GatedDeltaNetConfig)
    assert (config.state_layers.doubles_beta, config.rms_norm_eps) == (True, 1e-6)
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size=2 .* norms over all heads: use pipeline_parallel_size"
    ):
        require_splittable(config, 2)
    # Where none of four attends the last one does.
    for num_layers, attending in ((3, {2}), (6, {3})):
        (tmp_path / "config.json").write_text(json.dumps(OLMO_HYBRID_7B | {"num_hidden_layers": num_layers}))
        config = ModelConfig.from_pretrained(tmp_path)
        assert {layer for layer in range(num_layers) if config.attends(layer)} == attending


def test_names_and_convolutions_of_olmo_hybrid_as_they_are_published(checkpoint, tmp_path):
    """transformers has one name for two norms, and cuts what is convolved into three of one size."""
    config = ModelConfig.from_pretrained(folder := checkpoint("olmo-hybrid").folder)
    weights = load_file(folder / "model.safetensors")
    for layer in (0, 2):
        names = [f"model.layers.{layer}.linear_attn.{kind}_conv1d.weight" for kind in "qkv"]
        parts = torch.cat([weights[name] for name in names]).split_with_sizes([32, 32, 128])
        weights |= dict(zip(names, map(torch.Tensor.contiguous, parts), strict=True))
    weights["model.layers.1.post_attention_layernorm.weight"] = weights.pop(
        "model.layers.1.feedforward_layer_norm.weight"
    )
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    published, expected = ModelConfig.from_pretrained(tmp_path), FROM_FILE.load(config)
    expected.prepack()
    assert_close(shared_logits(published, 1, FROM_FILE, num_stages=2), logits_of(expected))
    narrow = weights[names[1]][..., :3].contiguous()
    for others, message in (
        (weights | {names[1]: narrow}, r"conv1d\.weight in .* has parts of the shapes \(32, 1, 4\), \(32, 1, 3\), "),
        (
            {name: each for name, each in weights.items() if name != names[1]},
            r"lacks the tensor model\.layers\.2\.linear_attn\.k_conv1d\.weight",
        ),
    ):
        save_file(others, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=message):
            FROM_FILE.load(published)
    joined = torch.cat([weights.pop(name) for name in names])
    save_file(weights | {"model.layers.2.linear_attn.conv1d.weight": joined}, tmp_path / "model.safetensors")
    assert_close(logits_of(FROM_FILE.load(published)), logits_of(expected))
