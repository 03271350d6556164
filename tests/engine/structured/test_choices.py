"""Answers from a list of choices, and how likely the model finds each."""

import math

import pytest
import torch

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.errors import InvalidRequestError
from headrace.engine.llm import LLM
from headrace.engine.request import Request
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.structured.choices import build_choice_tree

from ..brute_force import choice_probabilities
from ..running import run_all

END = 1
CHOICES = {
    "first tokens differ": ((10,), (20,), (30, 31)),
    "first tokens shared": ((10, 11), (10, 12), (10, 13, 14), (20, 11)),
    "all begin alike": ((10, 11, 12, 13), (10, 11, 12, 14), (10, 11, 15)),
    "one begins another": ((10,), (10, 11), (10, 11, 12), (20,)),
    "longer than a block": (tuple(range(10, 40)), (*range(10, 39), 50), (9,)),
    "alone": ((10, 11, 12),),
}
PROMPT = [5, 6, 7, 8] * 9


@pytest.fixture(scope="module")
def engines(chat_folder) -> dict[bool, Engine]:
    """With and without prefix caching."""
    return {
        caching: Engine.from_pretrained(
            chat_folder,
            EngineConfig(
                block_size=8,
                num_gpu_blocks_override=40,
                enable_prefix_caching=caching,
                max_num_batched_tokens=30,
            ),
        )
        for caching in (True, False)
    }


@pytest.fixture(scope="module")
def expected(chat_model):
    def logits_after(tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return chat_model(torch.tensor([tokens])).logits[0, -1]

    return {name: choice_probabilities(logits_after, PROMPT, choices, END) for name, choices in CHOICES.items()}


def request_for(name: str, choices: tuple[tuple[int, ...], ...]) -> Request:
    return Request(name, PROMPT, SamplingParams(temperature=0, choices=[str(c) for c in choices]), choices)


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
@pytest.mark.parametrize("name", CHOICES)
def test_probabilities_are_the_models_and_the_label_is_the_likeliest(engines, expected, name, caching):
    (event,) = run_all(engines[caching], [request_for(name, CHOICES[name])])[name]
    assert event.choice_probabilities is not None
    assert event.choice_probabilities == pytest.approx(expected[name], rel=1e-4, abs=1e-7)
    assert sum(event.choice_probabilities) == pytest.approx(1)
    assert event.choice_index == max(range(len(expected[name])), key=expected[name].__getitem__)
    assert event.new_token_ids == CHOICES[name][event.choice_index]
    assert event.finish_reason == "stop"


@pytest.mark.parametrize("caching", [True, False], ids=["caching", "no caching"])
def test_probabilities_are_the_same_with_others_in_the_batch(engines, expected, caching):
    events = run_all(engines[caching], [request_for(name, choices) for name, choices in CHOICES.items()])
    for name, (event,) in events.items():
        assert event.choice_probabilities == pytest.approx(expected[name], rel=1e-4, abs=1e-7)


def test_what_choices_share_with_the_prompt_cache_never_counts_as_cached_prompt(engines):
    choices = CHOICES["longer than a block"][:2]
    for name in ("first", "second"):
        (event,) = run_all(engines[True], [request_for(name, choices)])[name]
    assert event.num_cached_tokens == len(PROMPT)


def test_a_temperature_draws_choices_instead(engines, expected):
    name = "first tokens shared"
    params = SamplingParams(choices=[str(choice) for choice in CHOICES[name]])
    requests = [Request(str(seed), PROMPT, params, CHOICES[name]) for seed in range(300)]
    drawn = [events[-1].choice_index for events in run_all(engines[True], requests).values()]
    shares = [drawn.count(index) / len(drawn) for index in range(len(CHOICES[name]))]
    assert shares == pytest.approx(expected[name], abs=0.12)


def test_the_tree_asks_the_model_only_where_choices_part():
    tree = build_choice_tree(CHOICES["first tokens shared"], None)
    assert [(node.path, node.children) for node in tree.nodes] == [((), (10, 20)), ((10,), (11, 12, 13))]
    assert build_choice_tree(CHOICES["alone"], None).nodes == ()


def test_the_probability_of_a_choice_is_the_product_along_its_route():
    tree = build_choice_tree(((1,), (1, 2), (3,)), END)
    first, second = tree.nodes
    logprobs = {first: [math.log(0.8), math.log(0.2)], second: [math.log(0.25), math.log(0.75)]}
    assert tree.probabilities(logprobs) == pytest.approx((0.2, 0.6, 0.2))


@pytest.mark.parametrize(
    ("choices", "end", "message"),
    [
        ((), END, "different, non-empty"),
        (((1,), ()), END, "different, non-empty"),
        (((7, 8), (9,), (7, 8)), END, "different, non-empty"),
        (((7,), (7, 8)), None, "no end-of-sequence token"),
        (((7,), (7, END)), END, "end-of-sequence token cannot be told"),
        (((7,), (7, END, 8), (6,)), END, "end-of-sequence token cannot be told"),
    ],
)
def test_choices_that_cannot_be_told_apart_are_refused(choices, end, message):
    with pytest.raises(InvalidRequestError, match=message):
        build_choice_tree(choices, end)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ([], "non-empty list"),
        ("yes", "non-empty list"),
        (["a", ""], "empty text"),
        (["b", "a", "c", "a"], "different from each other: 'a' is there 2 times$"),
    ],
)
def test_lists_of_choices_that_make_no_sense_are_refused(choices, message):
    with pytest.raises(InvalidRequestError, match=message):
        SamplingParams(choices=choices)


def test_choices_as_texts(chat_folder):
    llm = LLM(chat_folder, num_gpu_blocks_override=64)
    params = SamplingParams(temperature=0, choices=["ship", "shop", "bill", "ships"])
    outputs = llm.generate(["where is my parcel?", "why this invoice?"], params)
    for output in outputs:
        (completion,) = output.outputs
        assert completion.probabilities is not None
        assert list(completion.probabilities) == ["ship", "shop", "bill", "ships"]
        assert sum(completion.probabilities.values()) == pytest.approx(1)
        assert completion.text == max(completion.probabilities, key=completion.probabilities.__getitem__)
        assert llm.get_tokenizer().decode(completion.token_ids) == completion.text
