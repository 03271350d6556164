"""How many tokens are as likely as a given one."""

import pytest
import torch

from headrace.kernels.native import native_library
from headrace.kernels.sampling import token_ranks
from headrace.kernels.sampling.native import token_ranks_native
from headrace.kernels.sampling.reference import token_ranks_reference

from .tolerances import DTYPES

pytestmark = pytest.mark.usefixtures("_nan_filled_outputs")
WAYS = (token_ranks, token_ranks_native, token_ranks_reference)


@pytest.fixture(params=WAYS)
def rank(request):
    if request.param is token_ranks_native and native_library() is None:
        pytest.skip("needs the compiled kernels")
    return request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 8), (5, 1037), (40, 4096 + 17), (0, 40)], ids=str)
def test_a_rank_is_the_number_of_tokens_at_least_as_likely(shape, dtype, rank):
    rows, vocab = shape
    generator = torch.Generator().manual_seed(vocab)
    # Two decimal places, so that many are equal.
    logits = torch.randn(rows, vocab, generator=generator).mul(100).round().div(100).to(dtype)
    tokens = torch.randint(0, vocab, (rows,), generator=generator)
    expected = [sum(x >= row[token] for x in row) for row, token in zip(logits.tolist(), tokens.tolist(), strict=True)]
    assert rank(logits, tokens).tolist() == expected


def test_of_a_part_of_each_row(rank):
    logits = torch.arange(60.0).view(2, 30)[:, 3:25]
    assert rank(logits, torch.tensor([0, 21])).tolist() == [22, 1]


def test_what_is_forbidden_and_what_is_no_number(rank):
    logits = torch.tensor([[1.0, -torch.inf, 3.0] * 7, [1.0, torch.nan, 3.0] * 7])
    assert rank(logits, torch.tensor([1, 0])).tolist() == [21, 14]
    assert rank(logits, torch.tensor([2, 1])).tolist() == [7, 0]
