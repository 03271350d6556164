"""Whether reported tokens are the likeliest, but for rounding, which is every processor's own."""

from collections.abc import Mapping

import pytest
from torch import Tensor

from headrace.engine.logprobs import Logprob

# What the same sum in another order may differ by, many times over; the next token is a hundred times further off.
ROUNDING = 1e-4


def assert_likeliest(found: Mapping[int, Logprob], token: int, expected: Tensor, num_top: int) -> None:
    """The token comes first, then the likeliest, in their order; two that are alike but for rounding change places.

    expected: [vocab], the log-probabilities of all tokens.
    """
    ranks = [each.rank for each in found.values()]
    assert next(iter(found)) == token
    assert ranks[1:] == [rank for rank in range(1, min(num_top, len(expected)) + 1) if rank != ranks[0]]
    for other, each in found.items():
        assert each.logprob == pytest.approx(float(expected[other]), abs=1e-3)
        num_likelier = int((expected > expected[other] + ROUNDING).sum())
        assert num_likelier < each.rank <= int((expected >= expected[other] - ROUNDING).sum())
