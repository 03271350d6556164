"""How a model's authors would have it sampled, out of its files."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from headrace.engine.errors import ConfigError, ModelError
from headrace.engine.llm import LLM
from headrace.engine.sampling.defaults import read_sampling_defaults
from headrace.engine.sampling_params import SamplingParams

# Qwen2.5-Instruct's.
QWEN = {
    "bos_token_id": 151643,
    "do_sample": True,
    "eos_token_id": [151645, 151643],
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_p": 0.8,
    "top_k": 20,
    "transformers_version": "4.37.0",
}


def write(folder: Path, **generation: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_what_is_said_of_sampling_is_taken(tmp_path):
    assert read_sampling_defaults(write(tmp_path, **QWEN)) == {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "repetition_penalty": 1.05,
    }


@pytest.mark.parametrize("said", [{}, {"do_sample": False, "max_new_tokens": 8, "top_p": None}], ids=["{}", "others"])
def test_what_is_not_said_is_left_out(tmp_path, said):
    assert read_sampling_defaults(tmp_path) == {}
    assert read_sampling_defaults(write(tmp_path, **said)) == {}


def test_all_tokens_have_two_names(tmp_path):
    assert read_sampling_defaults(write(tmp_path, top_k=-1)) == {"top_k": 0}


@pytest.mark.parametrize(
    ("said", "problem"),
    [({"top_p": 1.5}, "top_p must be in"), ({"temperature": "hot"}, "temperature must be a number, not 'hot'")],
)
def test_what_can_not_be_is_named(tmp_path, said, problem):
    with pytest.raises(ModelError, match=rf"generation_config.json: {problem}.*generation_config vllm goes without"):
        read_sampling_defaults(write(tmp_path, **said))


def test_a_gguf_file_says_it_in_llama_cpps_words(tmp_path):
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "qwen3")
    writer.add_float32("general.sampling.temp", 0.5)
    writer.add_int32("general.sampling.top_k", -1)
    writer.add_float32("general.sampling.min_p", 0.25)
    writer.add_float32("general.sampling.penalty_repeat", 1.5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert read_sampling_defaults(file) == {"temperature": 0.5, "top_k": 0, "min_p": 0.25}


def test_an_llm_takes_them_where_nothing_is_said(chat_folder, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for file in chat_folder.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "generation_config.json").unlink(missing_ok=True)
    write(folder, temperature=5.0, top_k=1)
    options: dict[str, Any] = {"num_gpu_blocks_override": 16, "max_num_seqs": 2}
    llm = LLM(folder, **options)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=5.0, top_k=1)
    greedy, default, own = (
        llm.generate("a prompt", params)[0].outputs[0].token_ids
        for params in (SamplingParams(temperature=0), None, SamplingParams(temperature=5.0))
    )
    # Whoever says something says all.
    assert default == greedy != own
    assert LLM(folder, generation_config="vllm", **options).get_default_sampling_params() == SamplingParams()


def test_another_folder_may_say_it(chat_folder, tmp_path):
    options: dict[str, Any] = {"num_gpu_blocks_override": 16, "max_num_seqs": 2}
    llm = LLM(chat_folder, generation_config=str(write(tmp_path, temperature=0.5, top_k=7)), **options)
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, top_k=7)
    for none_such in ("vlm", str(tmp_path / "nowhere"), ""):
        with pytest.raises(ConfigError, match="generation_config must be auto, vllm, or a folder that has"):
            LLM(chat_folder, generation_config=none_such, **options)
