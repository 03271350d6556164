"""Prompts of any length: what is no token of the model is refused before anything is computed."""

from array import array

import pytest

from headrace.engine.errors import InvalidRequestError
from headrace.engine.request import Request
from headrace.engine.serving.admission import Admission

ADMISSION = Admission(max_model_len=1000, vocab_size=50, eos_token_ids=(2,), block_size=16, seed=0)


@pytest.mark.parametrize("length", [1, 100, 101, 500])
@pytest.mark.parametrize("kind", [list, lambda tokens: array("i", tokens)], ids=["list", "array"])
def test_an_unknown_token_is_found_wherever_it_stands(length, kind):
    good = [49] * length
    assert ADMISSION.accept(Request("good", kind(good)), arrival=0).stop_token_ids == {2}
    for unknown in (50, -1):
        for place in {0, length - 1}:
            bad = [*good[:place], unknown, *good[place + 1 :]]
            with pytest.raises(InvalidRequestError, match=f"token id {unknown} is outside the vocabulary of 50 tokens"):
                ADMISSION.accept(Request("bad", kind(bad)), arrival=1)
