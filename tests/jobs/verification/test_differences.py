"""Where two answers to one row are said to differ."""

import math
from typing import Any

import pytest

from headrace.jobs.verification.differences import first_difference

ANSWER: dict[str, Any] = {
    "row": 3,
    "custom_id": "a",
    "output": "It is a long text about parcels and what became of them in the end, of which nobody knows more.",
    "label": "x",
    "finish_reason": "stop",
    "prompt_tokens": 5,
    "completion_tokens": 7,
    "confidence": 0.75,
    "probabilities": {"x": 0.75, "y": 0.25},
    "outputs": ["one", "two"],
    "logprobs": [
        {"token": "It", "token_id": 4, "logprob": -0.5, "top": [{"token": "It", "token_id": 4, "logprob": -0.5}]},
        {"token": "is", "token_id": 5, "logprob": -30.0, "top": []},
    ],
    "error": None,
}


def token(index: int, **changed: Any) -> dict[str, Any]:
    tokens = list(ANSWER["logprobs"])
    tokens[index] = {**tokens[index], **changed}
    return {"logprobs": tokens}


@pytest.mark.parametrize(
    "same",
    [
        {},
        {"cached_tokens": 5},
        {"confidence": 0.755},
        {"probabilities": {"x": 0.751, "y": 0.249}},
        token(0, logprob=-0.505),
        # Both are as good as impossible.
        token(1, logprob=-20.0),
    ],
)
def test_answers_are_equal_within_the_tolerance(same):
    assert first_difference(ANSWER, ANSWER | same, 0.01) is None


@pytest.mark.parametrize(
    ("other", "place", "at"),
    [
        ({"output": ANSWER["output"].replace("long", "lost")}, "output", 10),
        ({"output": ANSWER["output"][:9]}, "output", 9),
        ({"label": "y", "output": "y"}, "label", 0),
        ({"label": None}, "label", None),
        ({"prompt_tokens": 6, "output": "y"}, "prompt_tokens", None),
        ({"error": "prompt is empty"}, "error", None),
        ({"outputs": ["one", "too"]}, "outputs[1]", 1),
        ({"outputs": ["one"]}, "outputs[1]", None),
        ({"completion_tokens": 8}, "completion_tokens", None),
        ({"confidence": 0.77}, "confidence", None),
        ({"confidence": math.nan}, "confidence", None),
        ({"probabilities": {"x": 0.75, "y": 0.2}}, "probabilities.y", None),
        (token(0, logprob=-0.52), "logprobs[0].logprob", None),
        (token(1, token_id=6), "logprobs[1].token_id", None),
        (token(0, top=[]), "logprobs[0].top[0]", None),
    ],
)
def test_the_first_difference_is_named(other, place, at):
    found = first_difference(ANSWER, ANSWER | other, 0.01)
    assert found is not None
    assert (found.row, found.custom_id, found.place, found.at) == (3, "a", place, at)


def test_a_difference_in_a_long_text_is_shown_with_what_is_around_it():
    found = first_difference(ANSWER, ANSWER | {"output": ANSWER["output"].replace("what", "that")}, 0.01)
    assert str(found) == (
        "row 3 (custom_id 'a'): output differs from character 36 on: "
        "…'t about parcels and what became of them in the end, of which'… before, "
        "…'t about parcels and that became of them in the end, of which'… now"
    )
