"""What is guessed, and how many tokens at a time."""

from array import array

import pytest

from headrace.engine.config import EngineConfig
from headrace.engine.errors import ConfigError
from headrace.engine.speculative.ngram import NgramDrafter
from headrace.engine.speculative.pace import Pace
from headrace.engine.speculative.speculative_config import SpeculativeConfig


@pytest.mark.parametrize(
    ("tokens", "shortest", "longest", "draft"),
    [
        ([1, 2, 3, 9, 1, 2], 2, 4, (3, 9, 1)),
        # The longest place first, then the last one.
        ([5, 1, 2, 7, 8, 1, 2, 3, 3, 5, 1, 2], 2, 3, (7, 8, 1)),
        ([5, 1, 2, 7, 8, 1, 2, 3, 3, 5, 1, 2], 2, 2, (3, 3, 5)),
        # What repeats itself goes on.
        ([4, 4], 1, 4, (4, 4, 4)),
        ([1, 2, 1, 2], 2, 4, (1, 2, 1)),
        ([7, 6, 5, 6, 5], 1, 9, (6, 5, 6)),
        ([1, 2, 3, 4, 2], 2, 4, ()),
        ([1, 2, 3, 4], 1, 4, ()),
        ([1], 1, 4, ()),
        ([1, 1], 2, 2, ()),
    ],
)
def test_what_followed_the_last_tokens_before(tokens, shortest, longest, draft):
    config = SpeculativeConfig(prompt_lookup_min=shortest, prompt_lookup_max=longest)
    known = array("i", tokens)
    assert NgramDrafter(config).draft(known, 3) == draft
    # Nothing of the look-up holds the array.
    known.append(1)


def test_the_lookup_is_that_of_trying_every_place():
    config = SpeculativeConfig(prompt_lookup_min=2, prompt_lookup_max=5)
    tokens = [(7 * index * index + index // 3) % 5 for index in range(200)]
    for end in range(1, len(tokens)):
        known = tokens[:end]
        following = next(
            (
                place + length
                for length in (5, 4, 3, 2)
                for place in reversed(range(len(known) - length))
                if known[place : place + length] == known[-length:]
            ),
            None,
        )
        expected = () if following is None else tuple((known[following:] * 4)[:4])
        assert NgramDrafter(config).draft(array("i", known), 4) == expected


def test_wrong_guesses_are_followed_by_fewer_and_by_pauses():
    pace = Pace(8)
    assert pace.number(10) == 8
    pace.verified(10, num_guessed=8, num_right=2)
    assert pace.number(13) == 3
    pace.verified(13, num_guessed=3, num_right=3)
    assert pace.number(17) == 6
    pace.verified(17, num_guessed=6, num_right=0)
    assert [pace.number(num_tokens) for num_tokens in (18, 19)] == [0, 1]
    pace.verified(19, num_guessed=1, num_right=0)
    assert [pace.number(num_tokens) for num_tokens in (20, 21, 22)] == [0, 0, 1]
    pace.verified(22, num_guessed=1, num_right=1)
    pace.verified(24, num_guessed=2, num_right=0)
    assert [pace.number(num_tokens) for num_tokens in (25, 26)] == [0, 1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "eagle"}, "speculative_config: method must be one of ngram, draft_model, medusa, not 'eagle'"),
        ({"prompt_lookup_min": 5}, "speculative_config: prompt_lookup_min=5 must be at most prompt_lookup_max=4"),
        (
            {"num_speculative_tokens": 0},
            "speculative_config: num_speculative_tokens must be a whole number, at least 1, not 0",
        ),
        (
            {"disable_by_batch_size": 1.5},
            "speculative_config: disable_by_batch_size must be a whole number, at least 1, not 1.5",
        ),
        (
            {"draft": 3},
            "speculative_config got an unknown option 'draft'; known: method, num_speculative_tokens, "
            "prompt_lookup_max, prompt_lookup_min, disable_by_batch_size, model",
        ),
        (
            {"method": "draft_model"},
            "speculative_config: method draft_model needs model, a folder or a Hugging Face id",
        ),
        ({"model": 3}, "speculative_config: model must be a folder or a Hugging Face id, not 3"),
        (
            {"method": "ngram", "model": "draft"},
            "speculative_config: model is for method draft_model or medusa, not ngram",
        ),
        (
            {"num_speculative_tokens": 2048},
            "speculative_config: num_speculative_tokens=2048 and the token before them do not fit into a step of "
            "max_num_batched_tokens=2048: lower num_speculative_tokens to 2047 or less, or raise "
            "max_num_batched_tokens to 2049",
        ),
        ([3], 'speculative_config must be a mapping like {"method": "ngram"}, not [3]'),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(ConfigError) as error:
        EngineConfig(speculative_config=options)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 20),
        ({"speculative_config": {"num_speculative_tokens": 3, "disable_by_batch_size": 4}}, 32),
        ({"speculative_config": {"num_speculative_tokens": 2, "disable_by_batch_size": 99}}, 60),
        ({"speculative_config": {"num_speculative_tokens": 9, "disable_by_batch_size": 99}}, 64),
    ],
)
def test_memory_is_measured_with_as_many_logits_as_a_step_may_want(options, most):
    assert EngineConfig(max_num_seqs=20, max_num_batched_tokens=64, **options).max_num_logits == most
