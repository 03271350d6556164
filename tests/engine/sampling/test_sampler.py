"""Samples: the right distribution, and nothing in them that depends on the batch."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.engine.llm import LLM
from headrace.engine.sampling.sampler import LogprobQuery, SampleRow, pick_choice, sample, token_logprobs
from headrace.engine.sampling_params import SamplingParams
from headrace.kernels.sampling import philox_uniform, sample_tokens
from headrace.kernels.sampling.philox import philox_4x32

# Random123's kat_vectors for philox4x32-10: counter, key, result.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, result):
    c0, c1, c2, c3 = (np.array([word], dtype=np.uint64) for word in words(counter))
    k0, k1 = (np.array([word], dtype=np.uint64) for word in words(key))
    assert [word.item() for word in philox_4x32((c0, c1, c2, c3), (k0, k1))] == words(result)


def test_uniforms_lie_inside_the_unit_interval_and_use_all_bits_of_seed_and_counter():
    large = 2**62 + 12345
    seeds = torch.tensor([0, 0, 1, large, large + 2**40, 2**63 - 1])
    counters = torch.tensor([0, 1, 0, 2**40, 2**40, 2**40 + 2**35])
    uniforms = philox_uniform(seeds, counters)
    assert uniforms[0] == (0x6627E8D5 + 0.5) / 2**32
    assert len(set(uniforms.tolist())) == len(seeds)
    many = philox_uniform(torch.zeros(100_000, dtype=torch.int64), torch.arange(100_000))
    assert 0 < float(many.min()) < 1e-4
    assert 1 - 1e-4 < float(many.max()) < 1
    assert float(many.mean()) == pytest.approx(0.5, abs=0.005)


def random_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def test_a_sample_does_not_depend_on_its_batch_mates():
    logits = random_logits(40, 101)
    rows = [
        SampleRow(SamplingParams(temperature=0.3 * (i % 5), top_k=i % 4, top_p=1 - 0.1 * (i % 3)), i * 977, i)
        for i in range(40)
    ]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    reversed_ = sample(logits.flip(0), rows[::-1])[::-1]
    assert together == alone == reversed_


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0),
        SamplingParams(temperature=2.0, top_k=1),
        SamplingParams(temperature=2.0, top_p=1e-9),
        SamplingParams(temperature=2.0, min_p=1.0),
        SamplingParams(temperature=1e-300),
    ],
    ids=["greedy", "top_k=1", "tiny top_p", "min_p=1", "tiny temperature"],
)
def test_what_leaves_only_the_most_likely_token_is_greedy(params):
    logits = random_logits(50, 211)
    tokens = sample(logits, [SampleRow(params, seed, 0) for seed in range(50)])
    assert tokens == logits.argmax(-1).tolist()


def filtered_distribution(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """What the parameters say about one row, token by token in plain numpy."""
    scaled = logits.astype(np.float64) / params.temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    kept = order[: params.top_k] if params.top_k else order
    mass_of_kept = sum(probs[token] for token in kept)
    nucleus, mass = [], 0.0
    for token in kept:
        if mass >= params.top_p:
            break
        nucleus.append(token)
        mass += probs[token] / mass_of_kept
    nucleus = [token for token in nucleus if probs[token] >= params.min_p * probs[order[0]]]
    result = np.zeros_like(probs)
    result[nucleus] = probs[nucleus] / probs[nucleus].sum()
    return result


FILTERS = {
    "plain": SamplingParams(),
    "temperature": SamplingParams(temperature=0.5),
    "top_k": SamplingParams(top_k=5),
    "top_k above the vocabulary": SamplingParams(top_k=10_000),
    "top_p": SamplingParams(top_p=0.7),
    "min_p": SamplingParams(min_p=0.1),
    "all": SamplingParams(temperature=1.7, top_k=12, top_p=0.9, min_p=0.05),
}


@pytest.mark.parametrize("name", FILTERS)
def test_samples_follow_the_filtered_distribution(name):
    params, draws = FILTERS[name], 20_000
    logits = random_logits(1, 23, seed=5)
    expected = filtered_distribution(logits[0].numpy(), params)
    tokens = sample(logits.expand(draws, -1), [SampleRow(params, 99, counter) for counter in range(draws)])
    counts = np.bincount(tokens, minlength=23)
    assert not counts[expected == 0].any(), "a token that is filtered out was drawn"
    likely = expected * draws >= 5
    chi_square = (((counts - expected * draws) ** 2)[likely] / (expected * draws)[likely]).sum()
    # Six standard deviations above the mean of a chi-square distribution.
    freedom = likely.sum() - 1
    assert chi_square < freedom + 6 * np.sqrt(2 * freedom) + 1


def test_equally_likely_tokens_are_told_apart_by_the_uniform_number():
    uniforms = torch.tensor([0.1, 0.3, 0.6, 0.9], dtype=torch.float64)
    ones, zeros = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    tokens = sample_tokens(torch.zeros(4, 4), ones, zeros, ones, zeros.double(), uniforms)
    assert tokens.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_draws_a_token_that_there_is(value):
    """The step after looks it up in the embedding, maybe before anybody knows that it is of no use."""
    params = [
        SamplingParams(temperature=0.7, top_p=0.5),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0),
    ]
    rows = [SampleRow(each, seed=1, counter=0) for each in params]
    partly, wholly = torch.zeros(3, 11), torch.full((3, 11), value)
    partly[:, 4:] = value
    for logits in (partly, wholly):
        assert all(0 <= token < 11 for token in sample(logits, rows))


def test_log_probabilities_are_the_tokens_own_and_the_likeliest():
    logits = random_logits(5, 23)
    tokens, nums = [3, 22, 0, 7, 7], [0, 4, 1, 50, 4]
    queries = [*map(LogprobQuery, nums)]
    found = token_logprobs(logits, tokens, queries)
    for row, (token, num) in enumerate(zip(tokens, nums, strict=True)):
        expected = logits[row].double().log_softmax(-1).tolist()
        likeliest = sorted(range(23), key=lambda other: -expected[other])[:num]
        assert list(found[row]) == list(dict.fromkeys([token, *likeliest]))
        values = {other: each.logprob for other, each in found[row].items()}
        assert values == pytest.approx({other: expected[other] for other in values}, abs=1e-5)
        order = sorted(range(23), key=lambda other: -expected[other])
        assert [each.rank for each in found[row].values()] == [order.index(other) + 1 for other in found[row]]
        assert found[row] == token_logprobs(logits[row : row + 1], [token], [queries[row]])[0]


def test_equally_likely_tokens_share_a_rank_or_have_one_each_among_the_likeliest():
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0, 1.0]])
    assert token_logprobs(logits, [3], [LogprobQuery(0)])[0][3].rank == 4
    found = token_logprobs(logits, [0], [LogprobQuery(5)])[0]
    assert [each.rank for each in found.values()] == [5, 1, 2, 3, 4]


def test_a_choice_is_drawn_with_its_probability():
    probabilities = (0.6, 0.0, 0.3, 0.1)
    drawn = [pick_choice(probabilities, SamplingParams(), seed) for seed in range(600)]
    assert np.bincount(drawn, minlength=4) / 600 == pytest.approx(probabilities, abs=0.07)
    assert pick_choice(probabilities, SamplingParams(temperature=0), 1) == 0
    assert {pick_choice(probabilities, SamplingParams(temperature=0.01), seed) for seed in range(50)} == {0}


@pytest.fixture(scope="module")
def answers(chat_folder):
    """What fresh engines answer to the same prompts, by how they run."""

    def answers_of(params: SamplingParams, prompts: list[str], **options: Any) -> list[tuple[int, ...]]:
        llm = LLM(chat_folder, num_gpu_blocks_override=64, **options)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]

    return answers_of


def test_seeded_samples_repeat_in_another_engine_with_another_batch(answers):
    params = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    together = answers(params, ["one", "two", "three"])
    alone = [answers(params, [prompt], max_num_batched_tokens=2)[0] for prompt in ("one", "two", "three")]
    assert together == alone
    assert answers(SamplingParams(max_tokens=12, seed=6, ignore_eos=True), ["one", "two", "three"]) != together


def test_without_a_seed_the_engines_own_decides_and_equal_prompts_differ(answers):
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    first = answers(params, ["one", "one"])
    assert first[0] != first[1]
    assert answers(params, ["one", "one"]) == first
    assert answers(params, ["one", "one"], seed=1) != first
