"""Options of vLLM's `LLM`, as scripts written for it give them."""

from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from headrace.engine.config import EngineConfig
from headrace.engine.errors import ConfigError
from headrace.engine.llm import LLM
from headrace.engine.offline.vllm_options import engine_config
from headrace.engine.sampling_params import SamplingParams

# What scripts say and what is so here anyway.
COMMON: dict[str, Any] = {
    "trust_remote_code": True,
    "tokenizer_mode": "auto",
    "task": "generate",
    "runner": "auto",
    "enable_chunked_prefill": True,
    "disable_log_stats": True,
    "max_logprobs": 100,
    "cpu_offload_gb": 0,
    "data_parallel_size": 1,
    "limit_mm_per_prompt": {"image": 2},
    "disable_custom_all_reduce": True,
    "distributed_executor_backend": "mp",
    "hf_overrides": {},
    "hf_token": None,
}


def test_what_is_so_anyway_changes_nothing():
    assert engine_config(COMMON) == EngineConfig()
    assert engine_config({**COMMON, "max_num_seqs": 3}) == EngineConfig(max_num_seqs=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill=False is .*: raise max_num_batched_tokens to the"),
        ({"disable_log_stats": False}, "disable_log_stats=False is vLLM's, and not possible here: outputs have no"),
        ({"cpu_offload_gb": 4}, "cpu_offload_gb=4 is vLLM's, and not possible here: weights do not leave the device"),
        ({"cpu_offload_gb": False}, "cpu_offload_gb=False"),
        ({"data_parallel_size": 2}, "data_parallel_size=2 .*: one process is one engine: `headrace run` starts"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend='ray' .*: processes of this host"),
        ({"hf_token": "hf_x"}, "hf_token.*: set HF_TOKEN"),
        ({"hf_overrides": {"rope_theta": 1}}, "hf_overrides=.*: change the config.json of a copy of the model"),
        ({"task": "embed"}, "task='embed' .*: models generate text"),
        ({"swap_space": "4"}, "swap_space must be a number of GiB, not '4'"),
        ({"swap_space": -1}, "swap_space must be a number of GiB, not -1"),
        ({"dtype": "int"}, "dtype must be one of auto, float32, bfloat16, float16, not 'int'"),
        ({"quantization": "awq"}, "not 'awq': of a checkpoint that is quantised its config.json says how"),
    ],
)
def test_what_is_not_possible_is_named_with_what_to_do(options, message):
    with pytest.raises(ConfigError, match=message):
        engine_config(options)


def test_other_names_mean_what_they_mean():
    assert engine_config({"swap_space": 0.5}).swap_space_bytes == 2**29
    names = {"half": "float16", "float": "float32", torch.bfloat16: "bfloat16", "auto": "auto"}
    assert [engine_config({"dtype": given}).dtype for given in names] == list(names.values())


def without_tokenizer(folder: Path, copy: Path) -> Path:
    return copytree(folder, copy, ignore=lambda _, names: [name for name in names if name.startswith("tokenizer")])


def test_the_tokenizer_may_come_from_elsewhere(chat_folder, tmp_path):
    options: dict[str, Any] = {"num_gpu_blocks_override": 16, "max_num_seqs": 2}
    params = SamplingParams(temperature=0, max_tokens=4)
    expected = LLM(chat_folder, tokenizer=str(chat_folder), **options).generate("a prompt", params)[0].outputs
    other = LLM(without_tokenizer(chat_folder, tmp_path / "model"), tokenizer=chat_folder, **options)
    assert other.generate("a prompt", params)[0].outputs == expected
