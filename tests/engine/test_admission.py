"""Prompts of any length: what is no token of the model is refused before anything is computed."""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

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


class Read(Sequence[int]):
    """Token ids that count how often they are looked at."""

    def __init__(self, tokens: Iterable[int]) -> None:
        self.tokens, self.times = list(tokens), 0

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, place: Any) -> Any:
        return self.tokens[place]

    def __iter__(self) -> Iterator[int]:
        self.times += 1
        return iter(self.tokens)


def test_a_prompt_is_read_once_however_many_sequences_begin_with_it():
    prompt = Read(range(40))
    served = ADMISSION.accept(Request("read", prompt), arrival=0)
    first, second = served.first_sequence(), served.first_sequence()
    assert prompt.times == 1
    first.token_ids.append(7)
    assert (first.token_ids[:-1].tolist(), second.token_ids.tolist()) == (list(range(40)), list(range(40)))


def test_what_a_caller_keeps_as_an_array_is_not_copied_and_not_changed():
    prompt = array("i", range(40))
    served = ADMISSION.accept(Request("kept", prompt), arrival=0)
    assert served.prompt is prompt
    served.first_sequence().token_ids.append(7)
    assert prompt == array("i", range(40))
