"""A job's description: what is refused, and what makes two jobs the same."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.engine.sampling_params import SamplingParams
from headrace.engine.structured.structured_outputs import StructuredOutputsParams
from headrace.jobs.errors import LaterVersion, SpecError
from headrace.jobs.spec.sampling import row_seed
from headrace.jobs.spec.schemas import JobSpec
from headrace.jobs.spec.stored import read_stored


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("temperature", -0.1, "temperature must be ≥ 0"),
        ("temperature", float("nan"), "temperature must be ≥ 0"),
        ("temperature", "warm", "temperature.*number"),
        ("top_p", 0, r"top_p must be in \(0, 1\]"),
        ("top_p", 1.5, r"top_p must be in \(0, 1\]"),
        ("top_k", -2, "top_k must be ≥ 0"),
        ("min_p", 2, r"min_p must be in \[0, 1\]"),
        ("max_tokens", 0, "max_tokens.*greater than or equal to 1"),
        ("max_tokens", 1.5, "max_tokens.*integer"),
        ("seed", -1, "seed.*greater than or equal to 0"),
        ("seed", 2**63, "seed.*less than"),
        ("presence_penalty", 3, r"presence_penalty must be in \[-2, 2\]"),
        ("frequency_penalty", float("nan"), "frequency_penalty must be in"),
        ("repetition_penalty", 0, "repetition_penalty must be > 0"),
        ("stop", [""], "stop must be without an empty text"),
        ("stop", [f"{number}" for number in range(65)], "stop: must be at most 64 texts"),
        ("stop", ["x" * 257], "stop: must be at most 64 texts of up to 256 characters$"),
        ("n", 1025, "n: must be at most 1024, not 1025"),
        ("stop", [3], "stop.*string"),
        ("stop", 7, "stop: .*a valid list, not 7"),
        ("temperature", float("inf"), "temperature must be ≥ 0, not inf"),
        ("top_p", float("nan"), "top_p must be in"),
        ("top_k", 1.5, "top_k: .*integer.*, not 1.5"),
        ("n", 0, "n must be ≥ 1, not 0"),
        ("n", 2, "n must be 1 with temperature 0"),
        ("n", "two", "n: .*integer.*, not 'two'"),
        ("min_tokens", -1, "min_tokens must be ≥ 0"),
        ("min_tokens", 257, "min_tokens must be ≥ 0 and at most max_tokens, not 257"),
        ("max_tokens", -1, "max_tokens: .*greater than or equal to 1, not -1"),
        ("logit_bias", {5: 101}, r"logit_bias must be in \[-100, 100\], not 101.0 \(token 5\)"),
        ("logit_bias", {"5": float("nan")}, "logit_bias must be in"),
        ("logit_bias", {"five": 1}, "logit_bias.*integer.*, not 'five'"),
        ("logit_bias", {-5: 1}, "logit_bias must be a mapping of token ids to numbers, not keyed by -5"),
        ("logit_bias", [5], "logit_bias.*dictionary"),
        ("stop_token_ids", [-1], "stop_token_ids must be a list of token ids"),
        ("stop_token_ids", ["a"], "stop_token_ids.0: .*integer.*, not 'a'"),
        ("allowed_token_ids", [], "allowed_token_ids must be a list with a token id, at least"),
        ("allowed_token_ids", ["a"], "allowed_token_ids.0: .*integer.*, not 'a'"),
        ("bad_words", "word", "bad_words: .*a valid list, not 'word'"),
        ("bad_words", ["word", " "], "bad_words must be without an empty text"),
        ("bad_words", ["word"] * 1025, "bad_words: must be at most 1024 texts of up to 256 characters"),
        ("bad_words", ["w" * 257], "bad_words: must be at most 1024 texts of up to 256 characters"),
        ("bad_words", ["\udcff"], "bad_words: is not valid UTF-8"),
        ("ignore_eos", "perhaps", "ignore_eos: .*boolean.*, not 'perhaps'"),
        ("logprobs", 5, "logprobs: .*boolean.*, not 5"),
        ("top_logprobs", 3, "top_logprobs: has no meaning without logprobs, not 3"),
        ("best_of", 3, "best_of: there is no such option"),
        ("stop", ["\udcff"], "stop: is not valid UTF-8"),
        ("top_q", 1, "top_q"),
    ],
)
def test_sampling_out_of_range_is_refused_and_named(field, value, problem):
    with pytest.raises(SpecError, match=problem) as refusal:
        JobSpec.parse(model="m", sampling={field: value})
    assert "\n" not in str(refusal.value)
    assert refusal.value.field is not None
    assert refusal.value.field.split(".")[:2] == ["sampling", field]


def test_more_likeliest_tokens_than_the_api_knows_are_refused():
    with pytest.raises(SpecError, match=r"top_logprobs: .*less than or equal to 20, not 21"):
        JobSpec.parse(model="m", sampling={"logprobs": True, "top_logprobs": 21})


@pytest.mark.parametrize(
    ("asked", "max_tokens"),
    [
        ({}, 256),
        ({"reasoning": True}, 32_768),
        ({"reasoning": True, "thinking_token_budget": 1000}, 1256),
        ({"reasoning": True, "max_tokens": 256}, 256),
        ({"reasoning": True, "thinking_token_budget": 1000, "max_tokens": 500}, 500),
    ],
    ids=str,
)
def test_an_answer_has_room_for_what_is_thought_before_it(asked, max_tokens):
    spec = JobSpec.parse(model="m", sampling=asked)
    assert spec.sampling.max_tokens == max_tokens
    # As it was decided then, whatever is the default later.
    assert read_stored(JobSpec, spec.stored()) == spec


@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids", "allowed_token_ids"])
def test_token_ids_are_checked_against_the_models_vocabulary(name):
    value = {6: 1.0, 7: 1.0} if name == "logit_bias" else [6, 7]
    sampling = JobSpec.parse(model="m", sampling={name: value}).sampling
    sampling.check_vocabulary(8)
    with pytest.raises(SpecError, match=f"{name}: token id 7 is outside the vocabulary of 7 tokens") as refusal:
        sampling.check_vocabulary(7)
    assert refusal.value.field == f"sampling.{name}"


def test_log_probabilities_are_asked_for_as_in_openais_chat_api():
    asked = {"logprobs": True, "top_logprobs": 5}
    assert JobSpec.parse(model="m", sampling=asked).sampling.params(None).logprobs == 5
    assert JobSpec.parse(model="m", sampling={"logprobs": True}).sampling.params(None).logprobs == 0
    assert JobSpec.parse(model="m").sampling.params(None).logprobs is None


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"choices": ()}, "choices"),
        ({"choices": ("a", "")}, "choices must not hold an empty text"),
        ({"choices": ("a", "a")}, "choices must be different"),
        ({"choices": (1, "1")}, "choices must be different"),
        # In YAML a bare yes and no; and true is written in another way in Python than in JSON.
        ({"choices": (True, False)}, "choices.0: .*a valid string, not True"),
        ({"limit": 0}, "limit"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_bad_description_is_refused_and_named(values, problem):
    with pytest.raises(SpecError, match=problem):
        JobSpec.parse(model="m", **values)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("choices", {"choices": frozenset({"a", "b"})}),
        ("stop", {"sampling": {"stop": {"a", "b"}}}),
        ("bad_words", {"sampling": {"bad_words": {"a", "b"}}}),
        ("stop_token_ids", {"sampling": {"stop_token_ids": {1, 2}}}),
        ("allowed_token_ids", {"sampling": {"allowed_token_ids": {1, 2}}}),
        ("structured_outputs.choice", {"sampling": {"structured_outputs": {"choice": {"a", "b"}}}}),
    ],
)
def test_a_set_is_refused_as_the_same_job_would_be_another_in_the_next_run(name, values):
    with pytest.raises(SpecError, match=f"^{name}: must be a list, as a set has no order"):
        JobSpec.parse(model="m", **values)


def test_choices_may_come_in_anything_that_has_an_order():
    labels = {"b": 1, "a": 2}
    for choices in (["b", "a"], labels.keys(), (label for label in labels)):
        assert JobSpec.parse(model="m", choices=choices).choices == ("b", "a")


def test_ratings_are_choices_as_they_are_written():
    ratings: Any
    for ratings in ([1, 2, 3], range(1, 4), np.arange(1, 4), ["1", 2, "3"]):
        assert JobSpec.parse(model="m", choices=ratings).choices == ("1", "2", "3")
        assert SamplingParams(temperature=0, choices=ratings).choices == ("1", "2", "3")
    outputs = {"sampling": {"structured_outputs": {"choice": [1, 2]}}}
    assert JobSpec.parse(model="m", **outputs).sampling.params(None).structured_outputs == StructuredOutputsParams(
        choice=["1", "2"]
    )


def test_the_model_is_an_absolute_path_wherever_the_worker_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert JobSpec.parse(model="m").model == str(tmp_path / "m")
    assert JobSpec.parse(model="~/m").model == str(Path.home() / "m")


def test_a_job_is_greedy_unless_asked_otherwise():
    assert JobSpec.parse(model="m").sampling.params(None).is_greedy


def test_one_stop_string_is_a_list_of_one():
    assert JobSpec.parse(model="m", sampling={"stop": "END"}) == JobSpec.parse(model="m", sampling={"stop": ["END"]})


def test_what_choices_have_no_use_for_is_refused():
    with pytest.raises(SpecError, match="stop has no meaning with choices"):
        JobSpec.parse(model="m", choices=("a", "b"), sampling={"stop": "c"})


@pytest.mark.parametrize("value", [object(), float("nan"), "\ud800"])
def test_a_template_is_told_what_can_be_stored(value):
    with pytest.raises(SpecError, match="chat_template_kwargs: can only have what JSON has"):
        JobSpec.parse(model="m", chat_template_kwargs={"x": [value]})


def test_a_description_survives_the_ledger():
    spec = JobSpec.parse(model="m", choices=("a", "b"), system="s", sampling={"temperature": 0.5, "seed": 3})
    assert read_stored(JobSpec, spec.stored()) == spec
    biased = JobSpec.parse(
        model="m", sampling={"logit_bias": {5: 1.5}, "stop_token_ids": [2], "n": 2, "temperature": 1}
    )
    assert read_stored(JobSpec, json.dumps(biased.stored())) == biased
    sampling = {"prompt_logprobs": 0, "allowed_token_ids": [3], "bad_words": ["a", "b"], "skip_special_tokens": False}
    new = JobSpec.parse(model="m", lora={"name": "kind", "path": "/kind"}, sampling=sampling)
    assert read_stored(JobSpec, new.stored()) == new


def test_a_description_without_what_is_new_is_one_that_earlier_versions_know():
    """Their workers take up the jobs of servers that were upgraded first, and refuse options that they do not know."""
    stored = JobSpec.parse(model="m").stored()
    first = {"model", "dtype", "quantization", "system", "prompt", "choices", "sampling", "limit", "endpoint", "cache"}
    assert stored.keys() == first | {"schema_version"}
    assert "prompt_logprobs" not in stored["sampling"]
    later = {"allowed_token_ids", "bad_words", "include_stop_str_in_output", "skip_special_tokens"}
    assert not later & stored["sampling"].keys()
    assert JobSpec.parse(model="m", sampling={"bad_words": None, "allowed_token_ids": None}).stored() == stored


@pytest.mark.parametrize(
    ("later", "problem"),
    [
        ({"beams": 4}, "(beams: there is no such option)"),
        ({"sampling": {"beams": 4}}, "(sampling.beams: there is no such option)"),
        ({"schema_version": 1000}, "(schema_version: Input should be less than or equal to"),
    ],
)
def test_a_description_of_a_later_version_is_known_as_such(later, problem):
    with pytest.raises(LaterVersion, match=f"of a later headrace {re.escape(problem)}.*: upgrade this one"):
        read_stored(JobSpec, {**JobSpec.parse(model="m").stored(), **later})


BASE = {"model": "/m", "prompt": "{text}"}


@pytest.mark.parametrize(
    "change",
    [
        {"model": "/n"},
        {"prompt": "{text}."},
        {"system": "s"},
        {"choices": ("a", "b")},
        {"dtype": "float32"},
        {"quantization": "int8"},
        {"limit": 5},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"lora": {"name": "kind", "path": "/kind"}},
        {"image": "picture"},
        {"sampling": {"temperature": 0.5}},
        {"sampling": {"seed": 1}},
        {"sampling": {"max_tokens": 5}},
        {"sampling": {"stop": ("END",)}},
        {"sampling": {"repetition_penalty": 1.1}},
        {"sampling": {"logit_bias": {5: 1}}},
        {"sampling": {"min_tokens": 1}},
        {"sampling": {"ignore_eos": True}},
        {"sampling": {"logprobs": True}},
        {"sampling": {"prompt_logprobs": 0}},
    ],
    ids=str,
)
def test_whatever_can_change_an_answer_changes_the_fingerprint(change):
    base = JobSpec.parse(**BASE).fingerprint("input")
    assert JobSpec.parse(**BASE).fingerprint("input") == base
    assert JobSpec.parse(**BASE | change).fingerprint("input") != base


def test_a_job_of_an_earlier_version_is_the_same():
    """Its folder is resumed: what has been added since, and nobody asks for, changes nothing."""
    fingerprint = JobSpec.parse(model="org/name", prompt="{text}").fingerprint("input")
    assert fingerprint == "4f6ae35820cda9044f150cc8e736079418f842acbafa6025b4c8639de7c07f29"


def test_the_inputs_content_is_part_of_the_fingerprint():
    spec = JobSpec.parse(**BASE)
    assert spec.fingerprint("one") != spec.fingerprint("other")


def test_the_order_of_choices_is_part_of_the_fingerprint():
    prints = {JobSpec.parse(**BASE, choices=choices).fingerprint("i") for choices in (("a", "b"), ("b", "a"))}
    assert len(prints) == 2


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_the_engine_takes_each_seed_that_a_job_may_have(seed):
    assert JobSpec.parse(model="m", sampling={"seed": seed}).sampling.params(None).seed == seed


def test_each_row_has_a_seed_of_its_own_that_never_changes():
    assert row_seed(7, 3) == ROW_SEED_7_3
    seeds = {row_seed(seed, row) for seed in range(20) for row in range(500)}
    assert len(seeds) == 20 * 500
    assert all(0 <= seed < 2**63 for seed in seeds)


# A job resumed by the next version must draw what the first half drew.
ROW_SEED_7_3 = 2820881036890788059
