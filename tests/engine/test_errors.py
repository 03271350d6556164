"""What errors say of what was given."""

import pytest

from headrace.engine.errors import InvalidRequestError, shown
from headrace.engine.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\nb", "'a\\nb'"),
        (("",), "['']"),
        ((), "[]"),
        ([1], "[1]"),
        (1.5, "1.5"),
        (10**5000, "a number of thousands of digits"),
        ([10**5000], "a number of thousands of digits"),
    ],
    ids=["text", "tuple", "empty", "list", "number", "long number", "list of it"],
)
def test_what_was_given_is_shown_in_one_line(value: object, text: str) -> None:
    assert shown(value) == text


def test_of_much_the_beginning_is_shown() -> None:
    """An error may be written for each of a million rows."""
    with pytest.raises(InvalidRequestError, match=r"not \[-1, -1, .*…$") as refused:
        SamplingParams(stop_token_ids=(-1,) * 100_000)
    assert len(str(refused.value)) < 300
