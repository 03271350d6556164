"""Penalties: the sparse way against the dense one, and against transformers."""

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from headrace.kernels.sampling import penalize_
from headrace.kernels.sampling.reference import penalized

from .tolerances import assert_close

VOCAB_SIZE = 37


def random_case(rows: int, prompt: int, output: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, and the tokens of prompts and outputs: [rows, prompt] and [rows, output]."""
    generator = torch.Generator().manual_seed(rows + prompt + output)
    logits = torch.randn(rows, VOCAB_SIZE, generator=generator) * 3
    prompts, outputs = (torch.randint(0, VOCAB_SIZE, (rows, n), generator=generator) for n in (prompt, output))
    return logits, prompts, outputs


def counts(tokens: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(tokens, VOCAB_SIZE).sum(1)


def sparsely(
    logits: Tensor, prompts: Tensor, outputs: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    in_output = counts(outputs)
    rows, tokens = (counts(prompts) + in_output).nonzero(as_tuple=True)
    result = logits.clone()
    penalize_(result, rows, tokens, in_output[rows, tokens], repetition[rows], presence[rows], frequency[rows])
    return result


@pytest.mark.parametrize(
    ("rows", "prompt", "output"),
    [(1, 1, 0), (1, 5, 1), (3, 0, 7), (17, 60, 90)],
    ids=["nothing yet", "one token", "no prompt", "many"],
)
def test_sparse_penalties_are_the_dense_ones(rows, prompt, output):
    logits, prompts, outputs = random_case(rows, prompt, output)
    repetition = torch.linspace(0.5, 2, rows)
    presence, frequency = torch.linspace(-2, 2, rows), torch.linspace(1.5, -1.5, rows)
    expected = penalized(logits, counts(prompts), counts(outputs), repetition, presence, frequency)
    assert_close(sparsely(logits, prompts, outputs, repetition, presence, frequency), expected)


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
def test_the_repetition_penalty_is_transformers(penalty):
    logits, prompts, outputs = random_case(9, 12, 6)
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.cat([prompts, outputs], 1), logits.clone())
    nothing, repetition = torch.zeros(9), torch.full((9,), penalty)
    assert_close(sparsely(logits, prompts, outputs, repetition, nothing, nothing), expected)
    assert_close(penalized(logits, counts(prompts), counts(outputs), repetition, nothing, nothing), expected)


def test_a_masked_token_stays_masked():
    logits = torch.full((1, VOCAB_SIZE), -torch.inf)
    ones = torch.ones(1)
    tokens = torch.arange(4).unsqueeze(0)
    assert sparsely(logits, tokens, tokens, ones * 1.5, ones, ones).equal(logits)
