"""The last layer computes each sequence's last token alone: what is sampled from, and what is cached, is the same."""

from array import array
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.execution.batch import Batch
from headrace.engine.execution.model_runner import ModelRunner
from headrace.engine.logprobs import PromptLogprobs
from headrace.engine.models.mlp import GatedMlp
from headrace.engine.scheduling.scheduled_sequence import ScheduledSequence
from headrace.engine.scheduling.sequence import Sequence

CPU = torch.device("cpu")
BLOCK_SIZE = 8
# A norm after each half as well, layers without keys and with inputs of their own, a mixture, windows, the plain one.
NAMES = ["llama", "gemma2", "gemma4-small", "mixtral", "qwen3"]


def scheduled(lens: list[int], ends: list[bool]) -> list[ScheduledSequence]:
    """Chunks of so many tokens of sequences that have no tokens computed yet, each in two blocks of its own."""
    result = []
    for number, (length, reaches_end) in enumerate(zip(lens, ends, strict=True)):
        tokens = array("i", [(7 * number + 3 * token) % 300 for token in range(length)])
        blocks = array("i", [2 * number + 1, 2 * number + 2])
        sequence = Sequence(str(number), tokens, length, BLOCK_SIZE, block_table=blocks)
        result.append(ScheduledSequence(sequence, length, reaches_end))
    return result


@pytest.mark.parametrize("ends", [[True, True, True], [False, True, False], [False] * 3], ids=["all", "one", "none"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_cache_are_those_of_all_tokens(checkpoint, name, ends):
    batch = Batch.build(scheduled([13, 1, 16], ends), BLOCK_SIZE, CPU)
    options = EngineConfig(device="cpu", dtype="float32", num_gpu_blocks_override=6, block_size=BLOCK_SIZE)
    runner = ModelRunner(ModelConfig.from_pretrained(checkpoint(name).folder), options)
    expected = runner.execute(replace(batch, last_tokens=None))
    caches = runner.memory.caches
    expected_caches = [cache.clone() for cache in caches]
    for cache in caches:
        cache.zero_()
    assert batch.last_tokens is not None
    assert runner._model.forward(
        *(batch.token_ids, batch.positions, caches, batch.slots, batch.attention, batch.last_tokens)
    ).shape == (3, runner._model.config.hidden_size)
    for cache in caches:
        cache.zero_()
    torch.testing.assert_close(runner.execute(batch), expected, rtol=1e-5, atol=1e-5)
    assert all(map(torch.equal, caches, expected_caches))


def test_layers_without_keys_of_their_own_compute_the_last_tokens_alone(checkpoint, monkeypatch):
    """In prompts that is half of a Gemma 4 E2B."""
    batch = Batch.build(scheduled([13, 1, 16], [True] * 3), BLOCK_SIZE, CPU)
    options = EngineConfig(device="cpu", dtype="float32", num_gpu_blocks_override=6, block_size=BLOCK_SIZE)
    runner = ModelRunner(ModelConfig.from_pretrained(checkpoint("gemma4-small").folder), options)
    computed, call = list[int](), GatedMlp.__call__

    def noted(mlp: GatedMlp, x: Tensor) -> Tensor:
        computed.append(len(x))
        return call(mlp, x)

    monkeypatch.setattr(GatedMlp, "__call__", noted)
    runner.execute(batch)
    assert computed == [30, 30, 3, 3, 3, 3]


def test_decodes_are_computed_as_they_are():
    assert Batch.build(scheduled([1, 1, 2], [True] * 3), BLOCK_SIZE, CPU).last_tokens is None


def test_a_prompt_whose_logprobs_are_wanted_is_computed_whole():
    chunks = scheduled([13, 12], [True, True])
    chunks[1].sequence.prompt_logprobs = PromptLogprobs(0, 12)
    batch = Batch.build(chunks, BLOCK_SIZE, CPU)
    assert batch.prompt_reader is not None
    assert batch.last_tokens is None
