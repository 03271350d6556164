"""The likeliest tokens against the obvious torch."""

import pytest
import torch

from headrace.kernels.sampling import likeliest_tokens
from headrace.kernels.sampling.reference import likeliest_tokens_reference

from .tolerances import DTYPES

pytestmark = pytest.mark.usefixtures("_nan_filled_outputs")


def drawn(rows: int, vocab: int, dtype: torch.dtype, scale: float = 5.0) -> torch.Tensor:
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 15), (2, 16), (5, 1037), (2, 4096 + 17), (0, 40)], ids=str)
def test_against_the_reference(shape, dtype):
    rows, vocab = shape
    logits = drawn(rows, vocab, dtype)
    found, expected = (choose(logits, True) for choose in (likeliest_tokens, likeliest_tokens_reference))
    assert found.tokens.equal(expected.tokens)
    assert found.logits.equal(expected.logits)
    torch.testing.assert_close(found.log_sum_exps, expected.log_sum_exps, rtol=2e-6, atol=2e-6)
    assert likeliest_tokens(logits).tokens.equal(expected.tokens)
    assert likeliest_tokens(logits).log_sum_exps is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_equal_logits_the_first_wins(dtype):
    logits = torch.zeros(4, 3000, dtype=dtype)
    for row, places in enumerate([(0, 1), (15, 16, 17), (7, 2050), (31, 1024 + 31)]):
        logits[row, list(places)] = 2.0
    assert likeliest_tokens(logits).tokens.tolist() == [0, 15, 7, 31]
    assert likeliest_tokens(torch.full((1, 50), -3.0, dtype=dtype)).tokens.tolist() == [0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_not_finite_are_known(dtype):
    logits = drawn(6, 2000, dtype)
    logits[1, 1999] = torch.nan
    logits[2, 3] = torch.inf
    logits[3] = -torch.inf
    logits[4, :1500] = -torch.inf
    found = likeliest_tokens(logits, with_log_sum_exp=True)
    assert found.logits.isfinite().tolist() == [True, False, False, False, True, True]
    finite = found.logits.isfinite()
    # Whatever was drawn is looked up in the embedding, maybe before anybody knows that it is of no use.
    assert all(0 <= token < 2000 for token in found.tokens.tolist())
    assert found.log_sum_exps is not None
    torch.testing.assert_close(found.log_sum_exps[finite], logits[finite].float().logsumexp(-1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rising_row_keeps_its_sum(dtype):
    """Each part has a new maximum, to which what was summed before is brought down."""
    logits = torch.linspace(-300, 300, 5000).unsqueeze(0).to(dtype)
    found = likeliest_tokens(logits, with_log_sum_exp=True)
    torch.testing.assert_close(found.log_sum_exps, logits.float().logsumexp(-1))


def test_rows_of_a_wider_tensor():
    logits = drawn(5, 64, torch.float32)
    assert likeliest_tokens(logits[:, 7:40]).tokens.equal(logits[:, 7:40].argmax(-1))
    assert likeliest_tokens(logits.t()).tokens.equal(logits.t().argmax(-1))
