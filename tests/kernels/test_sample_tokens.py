"""Drawing tokens: the quick ways against the obvious one, and nothing in a row's token that its neighbours decide."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from headrace.kernels.native import native_library
from headrace.kernels.sampling import sample_tokens
from headrace.kernels.sampling.cpu import sample_tokens_cpu
from headrace.kernels.sampling.native import sample_tokens_native
from headrace.kernels.sampling.reference import sample_tokens_reference

Draw = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

FILTERS: dict[str, dict[str, float]] = {
    "none": {},
    "hot": {"temperature": 3.0},
    "cold": {"temperature": 0.05},
    "coldest": {"temperature": 1e-300},
    "top_k": {"top_k": 7},
    "long top_k": {"top_k": 300},
    "longer top_k": {"top_k": 2500},
    "top_k of all": {"top_k": 10**6},
    "top_p": {"top_p": 0.7},
    "tiny top_p": {"top_p": 1e-9},
    "wide top_p": {"top_p": 0.999, "temperature": 5.0},
    "min_p": {"min_p": 0.02},
    "min_p of one": {"min_p": 1.0},
    "top_k and top_p": {"top_k": 40, "top_p": 0.8},
    "all": {"temperature": 1.7, "top_k": 120, "top_p": 0.95, "min_p": 0.001},
}
VOCABULARIES = (1, 5, 127, 128, 1000, 5003)
ROWS = 40


@pytest.fixture(params=[sample_tokens_cpu, sample_tokens_native])
def draw(request) -> Draw:
    if request.param is sample_tokens_native and native_library() is None:
        pytest.skip("needs the compiled kernels")
    return request.param


def random_logits(rows: int, vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """In bfloat16 many are equal."""
    generator = torch.Generator().manual_seed(vocab)
    return (torch.randn(rows, vocab, generator=generator) * 2.5).to(dtype)


def arguments(rows: int, *filters: dict[str, float]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Temperature, top_k, top_p, min_p and uniforms, the filters being taken in turn."""
    chosen = [filters[row % len(filters)] for row in range(rows)]

    def column(name: str, default: float, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.tensor([each.get(name, default) for each in chosen], dtype=dtype)

    uniforms = torch.rand(rows, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    return column("temperature", 1), column("top_k", 0, torch.int64), column("top_p", 1), column("min_p", 0), uniforms


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("name", FILTERS)
def test_the_quick_way_draws_what_the_obvious_one_draws(draw, name, vocab, dtype):
    logits, given = random_logits(ROWS, vocab, dtype), arguments(ROWS, FILTERS[name])
    assert draw(logits, *given).equal(sample_tokens_reference(logits, *given))


def test_rows_of_every_kind_are_drawn_together(draw):
    logits, given = random_logits(90, 1000), arguments(90, *FILTERS.values())
    before = logits.clone()
    assert draw(logits, *given).equal(sample_tokens_reference(logits, *given))
    assert logits.equal(before)


def test_whichever_way_there_is_is_taken():
    for logits in (random_logits(30, 5003), random_logits(30, 5003)[:, 7:4100], random_logits(5003, 30).t()):
        given = arguments(30, *FILTERS.values())
        assert sample_tokens(logits, *given).equal(sample_tokens_reference(logits, *given))


@pytest.fixture(params=[1, 2])
def threads(request) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rows_token_is_the_same_in_every_company(draw, dtype, threads):
    """Large enough for torch to share out one row's work, as it does when a row is alone."""
    rows, vocab = 24, 70_003
    logits = random_logits(rows, vocab, dtype)
    temperature, top_k, top_p, min_p, uniforms = given = arguments(rows, *FILTERS.values())
    together = draw(logits, *given)
    for chosen in (slice(0, 1), slice(3, 4), slice(14, 15), slice(2, 11), slice(None, None, 5)):
        part = (temperature[chosen], top_k[chosen], top_p[chosen], min_p[chosen], uniforms[chosen])
        assert draw(logits[chosen], *part).equal(together[chosen])
    turned = draw(logits.flip(0), *(column.flip(0) for column in given))
    assert turned.flip(0).equal(together)


def test_of_equally_likely_tokens_all_or_none_are_kept(draw):
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    uniforms = (torch.arange(64, dtype=torch.float64) + 0.5) / 64

    def drawn(**filters: float) -> set[int]:
        temperature, top_k, top_p, min_p, _ = arguments(64, filters)
        given = (temperature, top_k, top_p, min_p, uniforms)
        tokens = [choose(logits.expand(64, -1), *given) for choose in (draw, sample_tokens_reference)]
        assert tokens[0].equal(tokens[1])
        return set(tokens[0].tolist())

    assert drawn(top_k=1) == drawn(top_k=2) == drawn(top_p=0.3) == {1, 3}
    assert drawn(top_k=3) == drawn(top_k=5) == {1, 3, 4, 5, 6}
    assert drawn(top_k=6) == {1, 2, 3, 4, 5, 6}


def test_a_masked_token_is_never_drawn(draw):
    logits = torch.full((64, 300), -torch.inf)
    logits[:, [7, 250]] = 0.0
    for filters in FILTERS.values():
        given = arguments(64, filters)
        assert set(draw(logits, *given).tolist()) == {7, 250}


def test_the_extreme_uniform_numbers_stay_within_what_is_kept(draw):
    logits = random_logits(2, 1000)
    temperature, top_k, top_p, min_p, _ = arguments(2, {"top_k": 9})
    uniforms = torch.tensor([2.0**-33, 1 - 2.0**-33], dtype=torch.float64)
    tokens = draw(logits, temperature, top_k, top_p, min_p, uniforms).tolist()
    kept = logits.topk(9).indices
    assert tokens == [int(kept[0].min()), int(kept[1].max())]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_has_some_token_and_spoils_no_other(draw, bad):
    logits = random_logits(45, 1000)
    expected = draw(logits, *arguments(45, *FILTERS.values()))
    # A single token of minus infinity is only a masked one.
    logits[::3, :: 1 if bad == -torch.inf else 7] = bad
    tokens = draw(logits, *arguments(45, *FILTERS.values()))
    assert tokens.clamp(0, 999)[1::3].equal(expected[1::3])
    assert tokens[2::3].equal(expected[2::3])
