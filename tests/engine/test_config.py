"""Model folders and engine options: what is read from them, and what is refused with which message."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.engine.config import SUPPORTED_ARCHITECTURES, EngineConfig, ModelConfig
from headrace.engine.errors import ConfigError, ModelError
from headrace.engine.model_runner import num_blocks_in, resolve_device, resolve_dtype

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
}


def read(folder: Path, **changes: Any) -> ModelConfig:
    raw = {name: value for name, value in {**LLAMA, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(raw))
    return ModelConfig.from_pretrained(folder)


def test_fields_left_out_have_the_familys_defaults(tmp_path):
    config = read(tmp_path)
    assert (config.num_key_value_heads, config.head_dim) == (6, 8)
    assert (config.rope.theta, config.rope.rope_type) == (10000.0, "default")
    assert not config.tie_word_embeddings
    assert not any((config.qkv_bias, config.output_bias, config.mlp_bias, config.qk_norm))
    assert config.sliding_windows == (None,) * 4
    assert config.eos_token_ids == ()
    assert config.checkpoint_dtype == "float32"


def test_older_and_newer_spellings_of_rope_and_dtype_mean_the_same(tmp_path):
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    older = read(tmp_path, rope_theta=5e5, rope_scaling={"type": "llama3", **scaling}, torch_dtype="bfloat16")
    newer = read(
        tmp_path,
        rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling},
        dtype="torch.bfloat16",
    )
    assert older == newer
    assert (older.rope.theta, older.rope.factor, older.checkpoint_dtype) == (5e5, 8.0, "bfloat16")


def test_eos_ids_come_from_both_files_without_doubles(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert read(tmp_path, eos_token_id=2).eos_token_ids == (7, 2)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 9}, (None, None, None, None)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 9}, (9, 9, 9, 9)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 9}, (None, None, None, None)),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "max_window_layers": 3,
            },
            (None, None, None, 9),
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "sliding_window": 9, "use_sliding_window": True},
            (None, None, None, None),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (9, None, 9, None),
        ),
    ],
)
def test_sliding_windows_by_layer(tmp_path, changes, expected):
    assert read(tmp_path, **changes).sliding_windows == expected


@pytest.mark.parametrize(
    ("architecture", "expected"),
    [("Llama", (True, True)), ("Mistral", (False, False)), ("Qwen2", (True, False)), ("Qwen3", (True, True))],
)
def test_attention_bias_means_what_each_family_makes_of_it(tmp_path, architecture, expected):
    config = read(tmp_path, architectures=[f"{architecture}ForCausalLM"], attention_bias=True)
    assert (config.qkv_bias, config.output_bias) == expected


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(ModelError) as error:
        ModelConfig.from_pretrained(tmp_path / "nowhere")
    assert (
        one_line(error)
        == f"model folder {tmp_path / 'nowhere'} does not exist: name a folder here, nothing is downloaded"
    )


def test_a_folder_that_is_no_model(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        ModelConfig.from_pretrained(tmp_path)


def test_a_file_instead_of_a_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="is not a model folder"):
        ModelConfig.from_pretrained(tmp_path / "file")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"architectures": ', "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[]", "must hold a JSON object"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_broken_json(tmp_path, name, content, message):
    read(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelError) as error:
        ModelConfig.from_pretrained(tmp_path)
    assert message in one_line(error)
    assert name in str(error.value)


def test_an_unsupported_architecture_is_named_with_the_list_of_what_is(tmp_path):
    with pytest.raises(ModelError) as error:
        read(tmp_path, architectures=["BloomForCausalLM"])
    assert "BloomForCausalLM" in one_line(error)
    assert all(name in str(error.value) for name in SUPPORTED_ARCHITECTURES)


def test_no_architecture_at_all(tmp_path):
    with pytest.raises(ModelError, match="unsupported architecture gpt2"):
        read(tmp_path, architectures=None, model_type="gpt2")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "no field 'hidden_size'"),
        ({"vocab_size": "many"}, "field of the wrong kind"),
        ({"vocab_size": [1]}, "field of the wrong kind"),
        ({"hidden_act": "gelu"}, "unsupported hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "yarn"}}, "unsupported rope scaling 'yarn'"),
        ({"rope_scaling": {"type": "linear"}}, "no field 'factor'"),
    ],
)
def test_configs_that_cannot_be_served(tmp_path, changes, message):
    with pytest.raises(ModelError) as error:
        read(tmp_path, **changes)
    assert message in one_line(error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 12}, "block_size must be a power of two, not 12"),
        ({"block_size": 0}, "block_size must be a power of two, not 0"),
        ({"dtype": "int3"}, "dtype must be one of auto, float32, bfloat16, float16, not 'int3'"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1, not 0"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens must be at least 1, not -1"),
        ({"max_model_len": 0}, "max_model_len must be at least 1, not 0"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override must be at least 1, not 0"),
    ],
)
def test_engine_options_out_of_range(options, message):
    with pytest.raises(ConfigError) as error:
        EngineConfig(**options)
    assert one_line(error) == message


def test_kv_memory_is_counted_in_whole_blocks(tmp_path):
    model = read(tmp_path, num_key_value_heads=2)
    bytes_of_block = 2 * 4 * 2 * 8 * 16 * 2
    assert num_blocks_in(bytes_of_block * 3 + 1, model, 16, torch.bfloat16) == 3
    with pytest.raises(ConfigError, match=f"less than one KV block of {bytes_of_block} bytes"):
        num_blocks_in(bytes_of_block - 1, model, 16, torch.bfloat16)


def test_devices_and_dtypes():
    cpu = torch.device("cpu")
    assert resolve_device("cpu") == cpu
    assert resolve_dtype("float16", "float32", cpu) == torch.float16
    assert resolve_dtype("auto", "float32", cpu) == torch.float32
    assert resolve_dtype("auto", "float16", cpu) == torch.float32
    assert resolve_dtype("auto", "bfloat16", torch.device("cuda")) == torch.bfloat16
    with pytest.raises(ConfigError, match="unknown dtype 'nonsense'"):
        resolve_dtype("auto", "nonsense", cpu)
    with pytest.raises(ConfigError, match="device must be"):
        resolve_device("abacus")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_where_there_is_none():
    with pytest.raises(ConfigError, match="torch finds no CUDA GPU"):
        resolve_device("cuda:0")
