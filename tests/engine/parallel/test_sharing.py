"""Ranks of the tests: one that fails does not leave the others waiting for it."""

import pytest
import torch
from torch import Tensor

from headrace.engine.sharding.ranks import Ranks

from .sharing import together


@pytest.mark.parametrize("failing", [(0, 0), (0, 1), (1, 0), (1, 1)], ids="stage {0[0]}, rank {0[1]}".format)
def test_what_the_first_to_fail_says_is_raised_at_once(tmp_path, failing):
    def compute(ranks: Ranks) -> Tensor:
        ranks.meet()
        if (ranks.stage, ranks.rank) == failing:
            raise ValueError("asked for by the test")
        return ranks.hear(ranks.sum(torch.ones(3)))

    with pytest.raises(ValueError, match="asked for by the test"):
        together(compute, tmp_path / "rendezvous", 2, 2)
