"""Heads guess by the model's hidden states: fitted to an answer they are right, and no answer depends on them."""

import json
from array import array
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import one_hot, silu

from headrace.engine.errors import ConfigError, ModelError
from headrace.engine.llm import LLM
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.scheduling.head_drafter import HeadDrafter
from headrace.engine.scheduling.sequence import Sequence
from headrace.engine.scheduling.step_plan import StepPlan

from ..families import VOCAB_SIZE

PROMPT = "to be or not to be"
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 64}
NUM_HEADS, NUM_BLOCKS = 3, 2


def save_heads(folder: Path, tensors: dict[str, Tensor], **config: int) -> Path:
    """As FasterDecoding/Medusa names them."""
    folder.mkdir(exist_ok=True)
    known = {"medusa_num_heads": NUM_HEADS, "medusa_num_layers": NUM_BLOCKS, **config}
    (folder / "config.json").write_text(json.dumps(known))
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    return folder


def heads(hidden: Tensor, said: SequenceOf[int], first: int) -> dict[str, Tensor]:
    """Heads that are right from the `first` position on of what was said. hidden: [num_tokens, hidden_size]."""
    size, generator = hidden.shape[1], torch.Generator().manual_seed(3)
    tensors: dict[str, Tensor] = {}
    for head in range(NUM_HEADS):
        x = hidden[first : len(said) - 2 - head]
        for block in range(NUM_BLOCKS):
            weight, bias = torch.randn(size, size, generator=generator) / size, torch.randn(size, generator=generator)
            tensors |= {f"{head}.{block}.linear.weight": weight, f"{head}.{block}.linear.bias": bias}
            x = x + silu(x @ weight.T + bias)
        wanted = one_hot(torch.tensor(said[first + 2 + head :]), VOCAB_SIZE).to(x.dtype)
        # Fewer tokens than dimensions: they can all be had exactly.
        tensors[f"{head}.{NUM_BLOCKS}.weight"] = (torch.linalg.pinv(x) @ wanted).T.contiguous()
    return tensors


@pytest.fixture(scope="module")
def said(chat_folder: Path) -> list[int]:
    """The prompt and what the model answers."""
    [output] = LLM(chat_folder, **OPTIONS).generate(PROMPT, GREEDY)
    return [*output.prompt_token_ids, *output.outputs[0].token_ids]


@pytest.fixture(scope="module")
def heads_folder(chat_model: Any, said: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.inference_mode():
        hidden = chat_model(torch.tensor([said]), output_hidden_states=True).hidden_states[-1][0]
    folder: Path = tmp_path_factory.mktemp("heads")
    return save_heads(folder, heads(hidden.clone(), said, len(PROMPT) - 2))


def guessing(chat_folder: Path, heads_folder: Path, **options: Any) -> LLM:
    speculative = {"method": "medusa", "model": str(heads_folder), "num_speculative_tokens": NUM_HEADS}
    return LLM(chat_folder, **{**OPTIONS, **options}, speculative_config=speculative)


@pytest.mark.parametrize(
    "options", [{}, {"async_scheduling": True}, {"max_num_batched_tokens": 8, "block_size": 4}], ids=str
)
def test_what_was_fitted_to_an_answer_guesses_it(chat_folder, heads_folder, said, options):
    llm = guessing(chat_folder, heads_folder, **options)
    for _ in range(2):
        [output] = llm.generate(PROMPT, GREEDY)
        assert [*output.prompt_token_ids, *output.outputs[0].token_ids] == said
    stats = llm.engine.stats
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 2 * 28


def test_among_others_each_has_its_own_rows(chat_folder, heads_folder, said):
    """Other rows are guessed wrong, so that they begin at other places, and some with no guess."""
    llm = guessing(chat_folder, heads_folder, max_num_seqs=5)
    others = ["to be or not", "one two", PROMPT, "x", PROMPT + "!"]
    expected = LLM(chat_folder, **OPTIONS).generate(others, GREEDY)
    for output, alone in zip(llm.generate(others, GREEDY), expected, strict=True):
        assert output.outputs[0].token_ids == alone.outputs[0].token_ids
    stats = llm.engine.stats
    assert 28 <= stats.num_accepted_tokens < stats.num_draft_tokens


def test_a_guess_is_made_from_the_row_that_the_last_token_was_drawn_from():
    one, other = (Sequence(name, array("i", [1, 2, 3]), 3, block_size=8) for name in "ab")
    drafter = HeadDrafter(num_heads=2)
    drafter.computed([one, one, one, other])
    for sequence, tokens in ((one, [4, 5]), (other, [6])):
        sequence.token_ids.extend(tokens)
    assert drafter.drafts({one: 1, other: 3}, budget=8) == {one: (0,), other: (0, 0)}
    assert (drafter.row(one), drafter.row(other)) == (1, 3)
    # It has two tokens more by now than its row tells of.
    other.token_ids.append(7)
    assert drafter.drafts({one: 3, other: 3}, budget=8) == {one: (0, 0)}
    drafter.forget()
    assert not drafter.drafts({one: 3}, budget=8)


def test_of_rows_that_a_step_overwrites_nothing_is_guessed(chat_folder, heads_folder):
    proposer = guessing(chat_folder, heads_folder).engine._launcher._proposer
    assert proposer is not None
    sequence = Sequence("a", array("i", [1, 2, 3]), 3, block_size=8)
    proposer.computed([sequence])
    sequence.token_ids.append(4)
    assert proposer.drafter.drafts({sequence: 1}, budget=8)
    # Of others, such as there are while it is swapped out.
    proposer.fill(StepPlan(budget=8))
    assert not proposer.drafter.drafts({sequence: 1}, budget=8)


@pytest.mark.parametrize(
    ("config", "number", "error", "message"),
    [
        ({}, 4, ConfigError, "num_speculative_tokens=4 are more than the 3 heads of .*: lower it to 3"),
        ({"medusa_num_heads": 0}, 1, ModelError, "is not of Medusa heads: medusa_num_heads must be .* not 0"),
        ({"medusa_num_heads": 4}, 4, ModelError, "lacks the tensor 3.0.linear.weight"),
        ({"medusa_num_layers": 1}, 3, ModelError, "tensor 0.1.weight"),
    ],
)
def test_heads_that_do_not_fit(config, number, error, message, chat_folder, heads_folder, tmp_path):
    save_heads(tmp_path, load_file(heads_folder / "medusa_lm_head.safetensors"), **config)
    speculative = {"method": "medusa", "model": str(tmp_path), "num_speculative_tokens": number}
    with pytest.raises(error, match=message):
        LLM(chat_folder, **OPTIONS, speculative_config=speculative)
