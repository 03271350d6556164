"""Answers that were begun come back as they were kept."""

import pytest

from headrace.engine.logprobs import Logprob
from headrace.jobs.shards.begun import Begun, bytes_of_token

TOKENS: tuple[int, ...] = (7, 2**31 + 5, 0)
# Of the first token, which is among the likeliest, one entry less than of the others.
TOP_TWO = Begun(
    TOKENS,
    (
        {7: Logprob(-0.1, 1), 3: Logprob(-2.5, 2)},
        {TOKENS[1]: Logprob(-9.75, 40), 7: Logprob(-0.2, 1), 3: Logprob(-1.5, 2)},
        {0: Logprob(float("-inf"), 11), 1: Logprob(-0.3, 1), 2: Logprob(-0.7, 2)},
    ),
)
TOP_NONE = Begun(TOKENS, tuple({token: each[token]} for token, each in zip(TOKENS, TOP_TWO.logprobs, strict=True)))


@pytest.mark.parametrize(("begun", "num_top"), [(Begun(TOKENS), None), (TOP_NONE, 0), (TOP_TWO, 2), (Begun(), 2)])
def test_what_is_kept_comes_back(begun, num_top):
    data = begun.to_bytes(num_top)
    assert len(data) == len(begun) * bytes_of_token(num_top)
    again = Begun.from_bytes(data, num_top)
    assert again == begun
    # The token's own comes first.
    assert [next(iter(each)) for each in again.logprobs] == [next(iter(each)) for each in begun.logprobs]


def test_pieces_kept_one_after_the_other_are_one_answer():
    first, rest = (Begun(TOKENS[part], TOP_TWO.logprobs[part]) for part in (slice(1), slice(1, None)))
    assert Begun.from_bytes(first.to_bytes(2) + rest.to_bytes(2), 2) == TOP_TWO


def test_an_answer_starts_with_what_is_its_beginning_to_the_last_token():
    whole = Begun((1, 2, 3))
    assert all(whole.starts_with(Begun(whole.token_ids[:length])) for length in range(4))
    assert not any(whole.starts_with(Begun(other)) for other in ((1, 3), (2,), (1, 2, 3, 4), (1, 2, 4)))
