"""A real model says the same with guesses and without, in float32, whatever it is asked."""

import json
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.checkpoints.model_size import kv_token_bytes
from headrace.engine.config import EngineConfig
from headrace.engine.errors import ConfigError, ModelError
from headrace.engine.execution.loaded_guessing import load_guessing
from headrace.engine.llm import LLM
from headrace.engine.offline.beam_search import BeamSearchParams
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.structured.structured_outputs import StructuredOutputsParams

from ..conftest import save_random_model
from ..families import ODD_SIZES, VOCAB_SIZE
from .test_medusa import heads, save_heads

NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
PROMPTS = ["to be or not to be, to be or not", "one two one two one two one", "x"]


def answers(llm: LLM, params: list[SamplingParams]) -> list[Any]:
    """Each prompt with each of the parameters, all at once."""
    asked = [(prompt, each) for prompt in PROMPTS for each in params]
    outputs = llm.generate([prompt for prompt, _ in asked], [each for _, each in asked])
    return [
        (
            completion.text,
            completion.token_ids,
            completion.finish_reason,
            completion.logprobs and len(completion.logprobs),
        )
        for output in outputs
        for completion in output.outputs
    ]


@pytest.fixture(scope="session")
def other_folder(chat_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smaller model with the same tokenizer."""
    folder = tmp_path_factory.mktemp("other") / "model"
    copytree(chat_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    sizes = {**config, "num_hidden_layers": 1, "intermediate_size": 40, "max_position_embeddings": 80}
    save_random_model(LlamaConfig(**{**sizes, "vocab_size": config["vocab_size"] + 3}), folder)
    return folder


@pytest.fixture
def speculative(
    request: pytest.FixtureRequest, chat_folder: Path, other_folder: Path, tmp_path: Path
) -> dict[str, Any]:
    if request.param == "heads":
        hidden_size = ModelConfig.from_pretrained(chat_folder).hidden_size
        # The same whichever tests came before.
        hidden = torch.randn(30, hidden_size, generator=torch.Generator().manual_seed(5))
        save_heads(tmp_path, heads(hidden, range(30), 0))
        return {"method": "medusa", "model": str(tmp_path), "num_speculative_tokens": 3}
    models = {"same": str(chat_folder), "other": str(other_folder)}
    return {"model": models[request.param], "num_speculative_tokens": 4} if request.param in models else NGRAM


@pytest.mark.parametrize(
    ("speculative", "options"),
    [
        ("ngram", {}),
        ("ngram", {"enable_prefix_caching": False, "max_num_batched_tokens": 96}),
        ("same", {}),
        ("other", {"num_gpu_blocks_override": 24, "max_model_len": 96}),
        ("heads", {"num_gpu_blocks_override": 24, "max_model_len": 96}),
    ],
    ids=str,
    indirect=["speculative"],
)
def test_answers_are_those_without_guesses(chat_folder, speculative, options):
    fixed = {"num_gpu_blocks_override": 256, "dtype": "float32", "max_num_seqs": 32, **options}
    plain, guessing = (
        LLM(chat_folder, **fixed),
        LLM(chat_folder, speculative_config={**speculative, "disable_by_batch_size": 32}, **fixed),
    )
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    drawn = SamplingParams(temperature=0.7, top_p=0.9, seed=4, max_tokens=30)
    [said] = plain.generate(PROMPTS[0], greedy)
    kinds = [
        greedy,
        replace(drawn, n=3),
        replace(drawn, logprobs=2),
        replace(greedy, stop=said.outputs[0].text[20:23]),
        replace(greedy, frequency_penalty=0.5),
        SamplingParams(temperature=0, max_tokens=20, structured_outputs=StructuredOutputsParams(regex="(ab|ba)+c")),
    ]
    assert answers(guessing, kinds) == answers(plain, kinds)
    stats = guessing.engine.stats
    # The other ones are random. Where guesses are the model's own, wrong ones are of answers that are not greedy.
    least = {str(chat_folder): 0.5, None: 0.001}.get(speculative.get("model"), 0.0)
    assert stats.num_draft_tokens > 0
    assert stats.num_accepted_tokens >= least * stats.num_draft_tokens
    beams = [llm.beam_search(PROMPTS[0], BeamSearchParams(beam_width=3, max_tokens=6)) for llm in (plain, guessing)]
    assert [each.tokens for each in beams[0][0].sequences] == [each.tokens for each in beams[1][0].sequences]


def test_a_draft_model_equal_to_the_model_is_right(chat_folder):
    llm = LLM(chat_folder, dtype="float32", num_gpu_blocks_override=64, speculative_config={"model": str(chat_folder)})
    greedy = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for _ in range(2):
        llm.generate(PROMPTS, greedy)
    stats = llm.engine.stats
    assert stats.num_accepted_tokens >= 0.95 * stats.num_draft_tokens > 200


def test_both_kv_caches_share_what_they_may_take(chat_folder, other_folder):
    bytes_of_tokens = [kv_token_bytes(ModelConfig.from_pretrained(each), 4) for each in (chat_folder, other_folder)]
    block_bytes = 16 * sum(bytes_of_tokens)
    options: dict[str, Any] = {"dtype": "float32", "speculative_config": {"model": str(other_folder)}}
    llm = LLM(chat_folder, kv_cache_memory_bytes=10 * block_bytes, **options)
    assert llm.engine.stats.num_blocks == 9
    with pytest.raises(ConfigError, match=f"raise kv_cache_memory_bytes to {17 * block_bytes}, or lower"):
        LLM(chat_folder, kv_cache_memory_bytes=10 * block_bytes, max_model_len=256, **options)


def test_a_draft_model_of_another_vocabulary_is_refused(chat_folder, other_folder, tmp_path):
    bare: dict[str, Any] = {"skip_tokenizer_init": True, "speculative_config": {"model": str(tmp_path)}}
    save_random_model(LlamaConfig(**{**ODD_SIZES, "vocab_size": 99}), tmp_path)
    with pytest.raises(ConfigError) as error:
        LLM(chat_folder, **bare)
    assert str(error.value) == (
        f"speculative_config: {chat_folder} has a vocabulary of {VOCAB_SIZE} tokens, the draft model {tmp_path} one "
        "of 99: take a draft model of the same family"
    )
    tokenizer = json.loads((chat_folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="of 99, and their tokenizers differ in 2 tokens, as 'a': take"):
        LLM(chat_folder, **bare)
    with pytest.raises(ModelError, match="does not exist"):
        LLM(chat_folder, speculative_config={"model": str(tmp_path / "nowhere")})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sliding_windows": (8, 8)}, "all layers of .* have sliding windows: use method ngram"),
        ({"vision": "eyes"}, "is for models of text alone, and .* reads images: use method ngram"),
    ],
)
def test_what_a_draft_model_cannot_follow_is_refused(change, message, chat_folder):
    options = EngineConfig(speculative_config={"model": str(chat_folder)})
    model = replace(ModelConfig.from_pretrained(chat_folder), **change)
    with pytest.raises(ConfigError, match=message):
        load_guessing(options, model)
