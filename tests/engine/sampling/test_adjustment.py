"""Penalties, biases and minimum length: what they mean, whom they touch, and what transformers makes of the same."""

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.engine.errors import InvalidRequestError
from headrace.engine.llm import LLM
from headrace.engine.request import Request
from headrace.engine.sampling import sampler
from headrace.engine.sampling.adjustment import Adjustment, adjust_
from headrace.engine.sampling.sampler import SampleRow, sample
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.structured.structured_outputs import StructuredOutputsParams
from headrace.engine.text.tokenizer import Tokenizer

VOCAB_SIZE = 29
PROMPT = [3, 4, 4, 5, 6, 6, 6]
STOPS = (1, 2)


def adjusted(logits: np.ndarray, params: SamplingParams, output: Sequence[int]) -> np.ndarray:
    """What the parameters say about one row's logits, token by token in plain numpy."""
    result = logits.astype(np.float64)
    for token in range(len(logits)):
        if token in STOPS and len(output) < params.min_tokens:
            result[token] = -np.inf
        if params.allowed_token_ids and token not in params.allowed_token_ids:
            result[token] = -np.inf
        result[token] += (params.logit_bias or {}).get(token, 0.0)
        if token in (*PROMPT, *output):
            up, down = params.repetition_penalty, 1 / params.repetition_penalty
            result[token] *= down if result[token] > 0 else up
        times = Counter(output)[token]
        result[token] -= params.frequency_penalty * times + (params.presence_penalty if times else 0)
    return result


PARAMS = {
    "repetition": SamplingParams(repetition_penalty=1.4),
    "repetition below one": SamplingParams(repetition_penalty=0.6),
    "presence": SamplingParams(presence_penalty=1.1),
    "frequency": SamplingParams(frequency_penalty=-0.7),
    "bias": SamplingParams(logit_bias={0: 100, 7: -100, 8: 0.5}),
    "min_tokens": SamplingParams(min_tokens=3),
    "allowed": SamplingParams(allowed_token_ids=[2, 8, 9], min_tokens=2, logit_bias={8: 1.5, 10: 100}),
    "all": SamplingParams(
        repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3, logit_bias={5: 2.0}, min_tokens=5
    ),
}
PLAIN = SamplingParams()


def random_logits(rows: int) -> Tensor:
    return torch.randn(rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(3)) * 2


def adjustment(params: SamplingParams, output: Sequence[int]) -> Adjustment | None:
    made = Adjustment.of(params, STOPS, len(PROMPT))
    return made and made.after([*PROMPT, *output])


@pytest.mark.parametrize("output", [(), (6,), (8, 8, 9, 3), (9, 9, 9, 9, 10)], ids=len)
@pytest.mark.parametrize("name", PARAMS)
def test_an_adjustment_is_what_its_parameters_say(name, output):
    logits = random_logits(1)
    expected = adjusted(logits[0].numpy(), PARAMS[name], output)
    made = adjustment(PARAMS[name], output)
    assert made is not None
    adjust_(logits, {0: made})
    np.testing.assert_allclose(logits[0].numpy(), expected, rtol=1e-5, atol=1e-5)


def test_a_row_is_touched_by_its_own_adjustment_only():
    outputs = [(), (5,), (7, 7), (8, 9, 8), (3, 3, 3, 3, 3)]
    wishes = [(params, output) for output in outputs for params in (PLAIN, *PARAMS.values())]
    logits = random_logits(len(wishes))
    made = {row: each for row, wish in enumerate(wishes) if (each := adjustment(*wish)) is not None}
    together = logits.clone()
    adjust_(together, made)
    for row, (params, _) in enumerate(wishes):
        alone = logits[row : row + 1].clone()
        if params is PLAIN:
            assert row not in made
        else:
            adjust_(alone, {0: made[row]})
        assert together[row].equal(alone[0])


def test_an_adjustment_that_grew_with_its_sequence_is_as_one_made_at_once():
    output = [8, 9, 8, 3, 8]
    growing = Adjustment.of(PARAMS["all"], STOPS, len(PROMPT))
    assert growing is not None
    for length in range(len(output) + 1):
        at_once = adjustment(PARAMS["all"], output[:length])
        assert at_once is not None
        logits = random_logits(2)[:1].repeat(2, 1)
        adjust_(logits, {0: growing.after([*PROMPT, *output[:length]]), 1: at_once})
        assert logits[0].equal(logits[1])


@pytest.mark.parametrize("piece", [0, 2**30], ids=["in pieces", "at once"])
@pytest.mark.parametrize("every_plain", [3, 40], ids=["some", "nearly all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sample_does_not_depend_on_the_adjustments_of_its_batch_mates(monkeypatch, dtype, every_plain, piece):
    monkeypatch.setattr(sampler, "_PIECE", piece)
    outputs = [(), (5,), (7, 7), (8, 9, 8), (3, 3, 3, 3, 3)]
    logits = random_logits(40).to(dtype)
    before = logits.clone()
    names = list(PARAMS)

    def row(index: int) -> SampleRow:
        params = PLAIN if index % every_plain == 0 else PARAMS[names[index % len(names)]]
        output = outputs[index % len(outputs)]
        return SampleRow(params, index * 31, len(output), adjustment(params, output))

    together = sample(logits, [row(index) for index in range(40)])
    alone = [sample(logits[index : index + 1], [row(index)])[0] for index in range(40)]
    turned = sample(logits.flip(0), [row(index) for index in range(39, -1, -1)])[::-1]
    assert together == alone == turned
    assert logits.equal(before)


@pytest.fixture(scope="module")
def llm(chat_folder) -> LLM:
    return LLM(chat_folder, num_gpu_blocks_override=128, max_num_seqs=4, max_num_batched_tokens=20)


# What transformers' generate calls the same.
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    ({"logit_bias": {70: 6.5, 71: -100.0, 1: 4.0}}, {"sequence_bias": {(70,): 6.5, (71,): -100.0, (1,): 4.0}}),
    (
        {"min_tokens": 20, "logit_bias": {1: 100}},
        {"min_new_tokens": 20, "sequence_bias": {(1,): 100.0}},
    ),
]


@pytest.mark.parametrize(("ours", "theirs"), SAME, ids=["repetition", "bias", "minimum length"])
def test_greedy_answers_are_transformers_in_any_batch(llm, chat_model, ours, theirs):
    prompts = ["a long prompt " * 3, "x", "a middling one", "a long prompt " * 3 + "too"]
    expected = []
    for prompt in prompts:
        ids = torch.tensor([llm.get_tokenizer().encode(prompt)])
        with torch.inference_mode():
            new = chat_model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=32, do_sample=False, pad_token_id=0, **theirs
            )
        expected.append(tuple(new[0, ids.shape[1] :].tolist()))
    params = SamplingParams(temperature=0, max_tokens=32, **ours)
    plain = SamplingParams(temperature=0, max_tokens=32)
    mixed = llm.generate(prompts + prompts, [params] * 4 + [plain] * 4)
    assert [output.outputs[0].token_ids for output in mixed[:4]] == expected
    assert [output.outputs for output in mixed[4:]] == [output.outputs for output in llm.generate(prompts, plain)]
    assert [output.outputs for output in mixed[4:]] != [output.outputs for output in mixed[:4]]


def test_the_model_ends_right_after_the_minimum_length_if_it_wants_to(llm):
    eager: dict[str, Any] = {"logit_bias": {1: 100}, "max_tokens": 9}
    for min_tokens in (0, 1, 5, 8):
        output = llm.generate("x", SamplingParams(min_tokens=min_tokens, **eager))[0].outputs[0]
        assert (len(output.token_ids), output.token_ids[-1], output.finish_reason) == (min_tokens + 1, 1, "stop")
    output = llm.generate("x", SamplingParams(min_tokens=9, **eager))[0].outputs[0]
    assert (len(output.token_ids), 1 in output.token_ids, output.finish_reason) == (9, False, "length")


def test_stop_token_ids_wait_for_the_minimum_length(llm):
    params = SamplingParams(min_tokens=4, max_tokens=9, stop_token_ids=(70,), logit_bias={70: 100})
    output = llm.generate("x", params)[0].outputs[0]
    assert (output.token_ids.index(70), output.finish_reason) == (4, "stop")


def test_a_frequency_penalty_keeps_an_answer_from_going_round_in_circles(llm):
    stuck: dict[str, Any] = {"temperature": 0, "logit_bias": {70: 100, 71: 70}, "max_tokens": 40, "ignore_eos": True}
    assert set(llm.generate("x", SamplingParams(**stuck))[0].outputs[0].token_ids) == {70}
    counts = Counter(llm.generate("x", SamplingParams(frequency_penalty=2, **stuck))[0].outputs[0].token_ids)
    assert counts.keys() >= {70, 71}


def test_a_bias_outside_the_vocabulary_is_refused_and_named(llm):
    with pytest.raises(InvalidRequestError, match=r"logit_bias: token id 307 is outside the vocabulary of 307 tokens"):
        llm.generate("x", SamplingParams(logit_bias={307: 1.0}))
    assert not llm.engine.has_work


def forbidden(output: Sequence[int], *words: Sequence[int]) -> list[int]:
    made = Adjustment.of(PLAIN, STOPS, len(PROMPT), bad_words=words)
    assert made is not None
    return list(made.after([*PROMPT, *output]).forbidden)


def test_a_bad_words_last_token_is_forbidden_behind_the_others():
    assert forbidden([], [9]) == [9]
    assert forbidden([7], [7, 8], [8, 7], [5]) == [8, 5]
    assert forbidden([7, 8], [6, 7, 8, 9], [7, 8, 9]) == [9]
    # What the prompt ends with does not count.
    assert forbidden([7], [6, 7, 8]) == []


def test_of_many_bad_words_the_same_are_forbidden_as_one_by_one():
    draw = random.Random(3)
    for _ in range(200):
        words = [[draw.randrange(4) for _ in range(draw.randint(1, 4))] for _ in range(12)]
        output = [draw.randrange(4) for _ in range(draw.randrange(6))]
        expected = {each[-1] for each in words if ends_with(output, each[:-1])}
        assert set(forbidden(output, *words)) == expected


def ends_with(output: list[int], tokens: list[int]) -> bool:
    return not tokens or output[-len(tokens) :] == tokens


def test_where_nothing_but_stopping_is_allowed_an_answer_may_be_short():
    params = SamplingParams(allowed_token_ids=[1, 2], min_tokens=3)
    made = adjustment(params, [])
    assert made is not None
    assert not list(made.forbidden)


def test_an_answer_is_made_of_what_is_allowed(llm):
    """Among others, who say what they like, and drawn as among the allowed alone."""
    params = SamplingParams(allowed_token_ids=[70, 80], max_tokens=12, temperature=3.0, seed=4, logprobs=1)
    plain = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    held, free = llm.generate(["abc", "abc"], [params, plain])
    assert set(held.outputs[0].token_ids) == {70, 80}
    assert not {70, 80} & set(free.outputs[0].token_ids)
    # As the model gives them.
    assert held.outputs[0].cumulative_logprob < 12 * np.log(0.5)


def test_bad_words_are_not_said(llm):
    """A model that would say nothing but a; what the prompt says does not count."""
    bias = dict(zip(llm.get_tokenizer().encode("abc"), (90, 60, 30), strict=True))
    said = {
        words: llm.generate("aa", SamplingParams(temperature=0, max_tokens=6, logit_bias=bias, bad_words=words))
        for words in ((), ("aaa",), ("aaa", "aab"), ("a",), (" a",))
    }
    assert [output.outputs[0].text for [output] in said.values()] == ["aaaaaa", "aabaab", "aacaac", "bbbbbb", "bbbbbb"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids must be a list with a token id, at least"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids must be a list of token ids"),
        ({"bad_words": "word"}, "bad_words must be a list of texts, not 'word'"),
        ({"bad_words": ["word", " "]}, "bad_words must be without an empty text"),
        ({"allowed_token_ids": [1], "choices": ["a"]}, "allowed_token_ids has no meaning with choices"),
        ({"bad_words": ["b"], "choices": ["a"]}, "bad_words has no meaning with choices"),
        ({"allowed_token_ids": [1], "reasoning": True}, "allowed_token_ids would bind the reasoning too"),
        (
            {"bad_words": ["b"], "structured_outputs": StructuredOutputsParams(regex="a")},
            "bad_words cannot be held to beside structured_outputs",
        ),
    ],
)
def test_allowed_tokens_and_bad_words_that_cannot_be(params, message):
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(**params)


def test_allowed_tokens_are_of_the_vocabulary_and_bad_words_come_in_tokens(llm):
    with pytest.raises(
        InvalidRequestError, match="prompt 0: allowed_token_ids: token id 999 is outside the vocabulary"
    ):
        llm.generate("a", SamplingParams(allowed_token_ids=[5, 999]))
    with pytest.raises(InvalidRequestError, match=r"bad_words need Request\.bad_words_token_ids"):
        llm.engine.add(Request("r", [5], SamplingParams(bad_words=["a"])))


def test_bad_words_have_vllms_tokens():
    """Those of the word itself, and with a space in front, where that is of the same length."""
    tickets = Tokenizer.from_pretrained(Path(__file__).parents[3] / "examples/tickets/model")
    bare, spaced = tickets.encode_choices(["the", " the"])
    assert len(bare) == len(spaced) == 1
    assert set(tickets.encode_bad_words(["the"])) == set(tickets.encode_bad_words([" the"])) == {bare, spaced}
