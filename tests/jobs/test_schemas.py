"""A job's description: what is refused, and what makes two jobs the same."""

from pathlib import Path

import pytest

from headrace.jobs.errors import SpecError
from headrace.jobs.schemas import JobSpec, row_seed


@pytest.mark.parametrize(
    ("field", "value", "problem"),
    [
        ("temperature", -0.1, "temperature must be ≥ 0"),
        ("temperature", float("nan"), "temperature must be ≥ 0"),
        ("temperature", "warm", "temperature.*number"),
        ("top_p", 0, r"top_p must be in \(0, 1\]"),
        ("top_p", 1.5, r"top_p must be in \(0, 1\]"),
        ("top_k", -1, "top_k must be ≥ 0"),
        ("min_p", 2, r"min_p must be in \[0, 1\]"),
        ("max_tokens", 0, "max_tokens.*greater than or equal to 1"),
        ("max_tokens", 1.5, "max_tokens.*integer"),
        ("seed", -1, "seed.*greater than or equal to 0"),
        ("seed", 2**63, "seed.*less than"),
        ("presence_penalty", 3, r"presence_penalty must be in \[-2, 2\]"),
        ("frequency_penalty", float("nan"), "frequency_penalty must be in"),
        ("repetition_penalty", 0, "repetition_penalty must be > 0"),
        ("stop", [""], "stop must be without an empty text"),
        ("stop", [3], "stop.*string"),
        ("stop", ["\udcff"], "stop: is not valid UTF-8"),
        ("top_q", 1, "top_q"),
    ],
)
def test_sampling_out_of_range_is_refused_and_named(field, value, problem):
    with pytest.raises(SpecError, match=problem) as refusal:
        JobSpec.parse(model="m", sampling={field: value})
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"choices": ()}, "choices"),
        ({"choices": ("a", "")}, "choices must not hold an empty text"),
        ({"choices": ("a", "a")}, "choices must be different"),
        ({"limit": 0}, "limit"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_bad_description_is_refused_and_named(values, problem):
    with pytest.raises(SpecError, match=problem):
        JobSpec.parse(model="m", **values)


def test_the_model_is_an_absolute_path_wherever_the_worker_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert JobSpec.parse(model="m").model == str(tmp_path / "m")
    assert JobSpec.parse(model="~/m").model == str(Path.home() / "m")


def test_a_job_is_greedy_unless_asked_otherwise():
    assert JobSpec.parse(model="m").sampling.params(0, None).is_greedy


def test_one_stop_string_is_a_list_of_one():
    assert JobSpec.parse(model="m", sampling={"stop": "END"}) == JobSpec.parse(model="m", sampling={"stop": ["END"]})


def test_what_choices_have_no_use_for_is_refused():
    with pytest.raises(SpecError, match="stop has no meaning with choices"):
        JobSpec.parse(model="m", choices=("a", "b"), sampling={"stop": "c"})


def test_a_description_survives_the_ledger():
    spec = JobSpec.parse(model="m", choices=("a", "b"), system="s", sampling={"temperature": 0.5, "seed": 3})
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec


BASE = {"model": "/m", "prompt": "{text}"}


@pytest.mark.parametrize(
    "change",
    [
        {"model": "/n"},
        {"prompt": "{text}."},
        {"system": "s"},
        {"choices": ("a", "b")},
        {"dtype": "float32"},
        {"limit": 5},
        {"sampling": {"temperature": 0.5}},
        {"sampling": {"seed": 1}},
        {"sampling": {"max_tokens": 5}},
        {"sampling": {"stop": ("END",)}},
        {"sampling": {"repetition_penalty": 1.1}},
    ],
    ids=str,
)
def test_whatever_can_change_an_answer_changes_the_fingerprint(change):
    base = JobSpec.parse(**BASE).fingerprint("input")
    assert JobSpec.parse(**BASE).fingerprint("input") == base
    assert JobSpec.parse(**BASE | change).fingerprint("input") != base


def test_the_inputs_content_is_part_of_the_fingerprint():
    spec = JobSpec.parse(**BASE)
    assert spec.fingerprint("one") != spec.fingerprint("other")


def test_the_order_of_choices_is_part_of_the_fingerprint():
    prints = {JobSpec.parse(**BASE, choices=choices).fingerprint("i") for choices in (("a", "b"), ("b", "a"))}
    assert len(prints) == 2


def test_each_row_has_a_seed_of_its_own_that_never_changes():
    assert row_seed(7, 3) == ROW_SEED_7_3
    seeds = {row_seed(seed, row) for seed in range(20) for row in range(500)}
    assert len(seeds) == 20 * 500
    assert all(0 <= seed < 2**63 for seed in seeds)


# A job resumed by the next version must draw what the first half drew.
ROW_SEED_7_3 = 2820881036890788059
