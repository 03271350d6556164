"""Experts called once each with their tokens give what one call a token gives, however tokens are routed."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from headrace.kernels.moe import ExpertGroups, choose_experts, mix_experts, mix_experts_reference

from .tolerances import DTYPES, assert_close

NUM_EXPERTS, SIZE = 5, 7
ROUTINGS = {
    "all to one": [[3]] * 6,
    "all to the same two": [[4, 0]] * 6,
    "some experts without a token": [[1, 2], [2, 1], [1, 4], [4, 1]],
    "every token to every expert": [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0]],
    "one token": [[2, 0, 3]],
}


@pytest.fixture
def experts() -> list["CountingExpert"]:
    torch.manual_seed(0)
    return [CountingExpert(torch.randn(SIZE, SIZE)) for _ in range(NUM_EXPERTS)]


class CountingExpert:
    """A matrix that notes how many tokens each call brings."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self.calls: list[int] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.calls.append(len(x))
        return linear(x, self.weight.to(x.dtype)).tanh()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_each_expert_is_called_once_with_all_its_tokens(experts, routing, dtype):
    ids = torch.tensor(routing)
    x, shares = torch.randn(len(ids), SIZE, dtype=dtype), torch.rand(ids.shape)
    mixed = mix_experts(x, experts, ids, shares)
    assert [expert.calls for expert in experts] == [
        [count] if count else [] for count in ids.flatten().bincount(minlength=NUM_EXPERTS).tolist()
    ]
    expected = mix_experts_reference(x, experts, ids, shares)
    assert_close(mixed, expected)


def test_the_likeliest_experts_are_chosen_with_their_probabilities():
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0]], dtype=torch.bfloat16)
    probabilities = logits.float().softmax(-1)
    ids, shares = choose_experts(logits, 2, normalise=False)
    assert ids.tolist() == [[1, 3]]
    torch.testing.assert_close(shares, probabilities[:, [1, 3]])
    assert shares.sum() < 1
    _, normalised = choose_experts(logits, 2, normalise=True)
    torch.testing.assert_close(normalised, shares / shares.sum())


def test_probabilities_are_chosen_with_what_corrects_them():
    logits, correction = torch.tensor([[0.0, 3.0, 1.0]]), torch.tensor([1.0, 0.0, -1.0])
    ids, shares = choose_experts(logits, 2, normalise=False, correction=correction, are_sigmoids=False)
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(shares, logits.softmax(-1)[:, :2])


def test_of_groups_those_with_the_best_expert_are_chosen_and_of_corrected_ones_with_the_best_two():
    logits, groups = torch.tensor([[9.0, 0.0, 8.0, 7.0, 1.0, 2.0]]), ExpertGroups(3, 1)
    ids, shares = choose_experts(logits, 2, normalise=False, groups=groups)
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(shares, logits.softmax(-1)[:, :2])
    ids, shares = choose_experts(logits, 2, normalise=False, correction=torch.zeros(6), groups=groups)
    assert ids.tolist() == [[2, 3]]
    torch.testing.assert_close(shares, logits.sigmoid()[:, 2:4])


def test_sigmoids_are_chosen_with_what_corrects_them():
    logits, correction = torch.tensor([[0.0, 3.0, 1.0]]), torch.tensor([1.0, 0.0, -1.0])
    ids, shares = choose_experts(logits, 2, normalise=False, correction=correction, scale=2.0)
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(shares, 2 * logits.sigmoid()[:, :2])
    _, normalised = choose_experts(logits, 2, normalise=True, correction=correction)
    torch.testing.assert_close(normalised, shares / shares.sum())
