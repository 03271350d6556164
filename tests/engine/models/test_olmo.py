"""OLMo 2, which OLMo 3 adds windows to, and OLMo 3 as its first configs say it; OLMo 3 itself is among the families."""

import json

import pytest
from transformers import Olmo2Config

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.errors import ConfigError
from headrace.engine.request import Request
from headrace.engine.sharding.shares import require_splittable

from ..conftest import NUM_NEW_TOKENS, greedy, save_random_model
from ..families import ODD_SIZES, PHI3_TOKENS
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
