"""What varies among Falcons beside the one that stands among the families, and what is refused of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.engine.checkpoints.model_config import DecoderNames, FalconConfig, MlpNames, ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.errors import InvalidRequestError, ModelError
from headrace.engine.lora_request import LoRARequest
from headrace.engine.request import Request

from ..conftest import greedy, save_random_model
from ..families import FAMILIES, ODD_SIZES, falcon
from ..running import greedy_params, run_all, token_ids

VARIANTS: dict[str, dict[str, Any]] = {
    "side by side, one key": {},
    "in series, a key a head": {"multi_query": False, "parallel_attn": False, "bias": True},
    "side by side, a key a head": {"multi_query": False},
    "groups, one norm": {
        "new_decoder_architecture": True,
        "num_kv_heads": 3,
        "num_ln_in_parallel_attn": 1,
        "bias": True,
    },
}
# As tiiuae/falcon-7b, falcon-40b and falcon-11B are published, of what matters.
FALCON_7B = {
    "architectures": ["FalconForCausalLM"],
    "alibi": False,
    "bias": False,
    "eos_token_id": 11,
    "hidden_size": 4544,
    "layer_norm_epsilon": 1e-05,
    "model_type": "falcon",
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "num_kv_heads": 71,
    "parallel_attn": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 65024,
}
FALCON_40B = FALCON_7B | {
    "hidden_size": 8192,
    "new_decoder_architecture": True,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_kv_heads": 8,
}
FALCON_3 = {
    "activation": "swiglu",
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "eos_token_id": 11,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000042,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 131072,
}

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def read(folder: Path, raw: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    return ModelConfig.from_pretrained(folder)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_its_tokens_are_those_of_transformers(tmp_path, options):
    model = save_random_model(falcon(ODD_SIZES, **options), tmp_path)
    prompts = [list(range(3, 40)), [5, 6, 7]]
    engine = Engine.from_pretrained(tmp_path, EngineConfig(num_gpu_blocks_override=60, max_num_batched_tokens=16))
    requests = [Request(str(index), prompt, greedy_params(24)) for index, prompt in enumerate(prompts)]
    events = run_all(engine, requests)
    expected = [greedy(model, prompt)[:24] for prompt in prompts]
    assert [token_ids(events[request.request_id]) for request in requests] == expected
    assert all(len(set(answer)) > 5 for answer in expected)


def test_the_first_architecture_as_it_is_published(tmp_path):
    """One KV head, whatever num_kv_heads says; what it leaves out is what its family has."""
    config = read(tmp_path, FALCON_7B)
    assert (config.num_key_value_heads, config.head_dim, config.rotary_dim) == (1, 64, 64)
    assert (config.intermediate_size, config.max_position_embeddings) == (18176, 2048)
    assert (config.tie_word_embeddings, config.qkv_bias, config.rms_norm_eps) == (True, False, 1e-5)
    assert config.falcon == FalconConfig(True, "input_layernorm", None)
    mlp = MlpNames(("dense_h_to_4h",), "dense_4h_to_h")
    assert config.names == DecoderNames("transformer.word_embeddings", "transformer.h", "transformer.ln_f", mlp=mlp)


def test_the_new_architecture_as_it_is_published(tmp_path):
    large = read(tmp_path, FALCON_40B)
    assert (large.num_key_value_heads, large.falcon) == (8, FalconConfig(True, "ln_attn", "ln_mlp"))
    second = read(tmp_path, FALCON_40B | {"num_ln_in_parallel_attn": 1, "ffn_hidden_size": 16384})
    assert (second.intermediate_size, second.falcon) == (16384, FalconConfig(True, "input_layernorm", None))


def test_falcon_3_is_a_llama(tmp_path):
    config = read(tmp_path, FALCON_3)
    assert (config.decoder_layer, config.falcon, config.names) == ("llama", None, DecoderNames())
    assert (config.head_dim, config.ropes[0].theta, config.checkpoint_dtype) == (256, 1000042, "bfloat16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alibi": True}, "alibi is set: .* not supported, use a Falcon with rotary"),
        ({"activation": "relu"}, "activation is 'relu'; supported: gelu"),
        ({"quantization_config": FP8}, "quantization_config is set: quantised Falcon"),
        ({"new_decoder_architecture": True, "num_kv_heads": 5}, "71 is no multiple of num_key_value_heads 5"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, change, message):
    with pytest.raises(ModelError, match=message):
        read(tmp_path, FALCON_7B | change)


def test_adapters_are_refused(tmp_path):
    save_random_model(FAMILIES["falcon-groups"], tmp_path)
    engine = Engine.from_pretrained(tmp_path, EngineConfig(num_gpu_blocks_override=60, enable_lora=True))
    lora = LoRARequest("x", 1, str(tmp_path / "adapter"))
    with pytest.raises(InvalidRequestError, match="models of this architecture cannot be adapted"):
        engine.add(Request("r", [5], greedy_params(2), lora_request=lora))
