"""Sampling on the GPU against the reference that sorts in float64."""

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

from headrace.kernels.sampling import penalize_, penalties, philox_uniform
from headrace.kernels.sampling.bit_mask import apply_bit_mask, apply_bit_mask_reference
from headrace.kernels.sampling.reference import likeliest_tokens_reference, sample_tokens_reference
from headrace.kernels.sampling.triton import (
    apply_bit_mask_triton,
    likeliest_tokens_triton,
    penalize_triton,
    philox_uniform_triton,
    sample_tokens_triton,
)
from headrace.kernels.sampling.triton_kernels import likeliest_kernel

from .tolerances import assert_close

# What the interpreter says of infinities that are meant.
pytestmark = [
    pytest.mark.usefixtures("_nan_filled_outputs"),
    pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning"),
]

FILTERS: dict[str, dict[str, float]] = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "freezing": {"temperature": 1e-300},
    "top_k": {"top_k": 5},
    "top_k=1": {"top_k": 1},
    "top_k=vocabulary": {"top_k": 1000},
    "top_p": {"top_p": 0.7},
    "tiny top_p": {"top_p": 1e-9},
    "min_p": {"min_p": 0.1},
    "min_p=1": {"min_p": 1.0},
    "all": {"temperature": 1.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02},
}
VOCAB_SIZE = 1000


def random_logits(rows: int, vocab_size: int, device: torch.device) -> Tensor:
    return (torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 2).to(device)


def parameters(
    rows: int, device: torch.device, temperature: float = 1, top_k: float = 0, top_p: float = 1, min_p: float = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Each row its own uniform number, spread evenly."""
    wishes = torch.tensor([[temperature], [top_p], [min_p]], dtype=torch.float64, device=device).repeat(1, rows)
    uniforms = (torch.arange(rows, dtype=torch.float64, device=device) + 0.5) / rows
    return wishes[0], torch.full((rows,), int(top_k), device=device), wishes[1], wishes[2], uniforms


@pytest.mark.parametrize("name", FILTERS)
def test_the_tokens_are_the_references(name, device):
    logits = random_logits(1, VOCAB_SIZE, device).expand(20, -1)
    arguments = (logits, *parameters(20, device, **FILTERS[name]))
    assert sample_tokens_triton(*arguments).tolist() == sample_tokens_reference(*arguments).tolist()


@pytest.mark.parametrize("vocab_size", [1, 2, 37, 4096, 9001])
def test_any_size_of_vocabulary_and_rows_of_different_wishes(vocab_size, triton_dtype, device):
    rows = len(FILTERS)
    logits = random_logits(rows, vocab_size + 3, device).to(triton_dtype)[:, :vocab_size]
    each = [parameters(rows, device, **wishes) for wishes in FILTERS.values()]
    arguments = [torch.stack([each[row][index][row] for row in range(rows)]) for index in range(5)]
    assert sample_tokens_triton(logits, *arguments).tolist() == sample_tokens_reference(logits, *arguments).tolist()


@pytest.mark.parametrize("name", ["plain", "top_k", "top_p", "min_p", "all"])
def test_equal_logits_are_kept_or_dropped_together(name, device):
    """Few different logits, zeros of both signs and masked tokens among them."""
    generator = torch.Generator().manual_seed(0)
    values = torch.tensor([-torch.inf, -1.5, -0.0, 0.0, 1.0, 2.0])
    highest = torch.tensor([6, 4] * 10)[:, None]
    logits = values[torch.randint(0, 12, (20, 50), generator=generator) % highest].to(device)
    arguments = (logits, *parameters(20, device, **FILTERS[name]))
    assert sample_tokens_triton(*arguments).tolist() == sample_tokens_reference(*arguments).tolist()


@pytest.mark.parametrize("name", ["plain", "top_k", "all"])
def test_a_target_at_either_end_finds_a_kept_token(name, device):
    logits = random_logits(2, VOCAB_SIZE, device)
    arguments = parameters(2, device, **FILTERS[name])
    ends = torch.tensor([1e-12, 1 - 1e-12], dtype=torch.float64, device=device)
    tokens = sample_tokens_triton(logits, *arguments[:4], ends)
    assert tokens.tolist() == sample_tokens_reference(logits, *arguments[:4], ends).tolist()


def test_the_likeliest_tokens_need_not_be_looked_for_again(monkeypatch, device):
    logits = random_logits(3, 300, device)
    arguments = (logits, *parameters(3, device, **FILTERS["all"]))
    likeliest, expected = logits.argmax(1), sample_tokens_reference(*arguments)
    monkeypatch.setattr("headrace.kernels.sampling.triton.likeliest_tokens_triton", None)
    assert sample_tokens_triton(*arguments, likeliest).tolist() == expected.tolist()


@pytest.mark.parametrize("top_p", [0.99, 0.999999, 1e-30])
@pytest.mark.parametrize("temperature", [1e-6, 0.3, 50.0])
def test_nothing_that_top_p_keeps_is_skipped(temperature, top_p, device):
    """Neighbouring floats, negative ones, and masked ones: what is left out of the search has next to no weight."""
    logits = -1000 - torch.arange(400, device=device).flip(0)[None].float() * torch.tensor(6e-5, device=device)
    logits[:, ::7] = -torch.inf
    arguments = (logits.expand(4, -1), *parameters(4, device, temperature=temperature, top_p=top_p))
    assert sample_tokens_triton(*arguments).tolist() == sample_tokens_reference(*arguments).tolist()


def spread_logits(kind: str) -> Tensor:
    """9,001 of a kind that a search has its troubles with."""
    place = torch.arange(9001)
    normal = torch.randn(9001, generator=torch.Generator().manual_seed(1))
    if kind == "one thread's":
        # What lies near the threshold has all one place in each of three pieces, more than are written down.
        return torch.where(place % 4096 < 8, 2 + normal * 1e-3, normal / 10)
    if kind == "orders of magnitude":
        return torch.where(place % 2 == 0, 1.0, -1.0) * 10.0 ** ((place * 7 % 9001) / 150 - 30)
    if kind == "steps":
        return (normal * 2).round()
    if kind == "far below":
        return torch.where(place < 7, 40 - place.float(), normal)
    return normal.bfloat16().float() if kind == "bfloat16" else normal


@pytest.mark.parametrize(
    "wishes",
    [{"top_k": 20}, {"top_k": 3000}, {"top_p": 0.5}, {"top_p": 0.999}, {"top_k": 3000, "top_p": 0.5}],
    ids=lambda wishes: "-".join(map(str, wishes.items())),
)
@pytest.mark.parametrize("kind", ["flat", "bfloat16", "one thread's", "orders of magnitude", "steps", "far below"])
def test_thresholds_are_found_however_logits_are_spread(kind, wishes, device):
    logits = spread_logits(kind).to(device).expand(5, -1)
    arguments = (logits, *parameters(5, device, **wishes))
    assert sample_tokens_triton(*arguments).tolist() == sample_tokens_reference(*arguments).tolist()


@pytest.mark.parametrize("name", ["plain", "top_k", "top_p", "all"])
def test_of_rows_that_are_not_finite_some_token_is_drawn(name, device):
    logits = random_logits(4, 300, device)
    logits[0, 200], logits[1], logits[2, 7], logits[3] = torch.nan, torch.nan, torch.inf, -torch.inf
    tokens = sample_tokens_triton(logits, *parameters(4, device, **FILTERS[name]))
    assert all(0 <= token < 300 for token in tokens.tolist())


def test_uniform_numbers_are_bit_for_bit_the_same(device):
    large = 2**62 + 12345
    seeds = torch.tensor([0, 0, 1, large, large + 2**40, 2**63 - 1] * 60, device=device)
    counters = torch.tensor([0, 1, 0, 2**40, 2**40 + 2**35, 7] * 60, device=device) + torch.arange(360, device=device)
    assert torch.equal(philox_uniform_triton(seeds, counters), philox_uniform(seeds, counters))


@pytest.mark.parametrize("with_log_sum_exp", [False, True])
@pytest.mark.parametrize("vocab_size", [1, 37, 9001])
def test_likeliest_tokens(vocab_size, with_log_sum_exp, triton_dtype, device):
    logits = random_logits(5, vocab_size, device).to(triton_dtype)
    logits[1] = 1.25
    logits[2, : vocab_size // 2] = -torch.inf
    # Equal ones a piece further, where a thread before the first one's has them.
    logits[3, 4000::100] = 50.0
    actual = likeliest_tokens_triton(logits, with_log_sum_exp)
    expected = likeliest_tokens_reference(logits, with_log_sum_exp)
    assert actual.tokens.tolist() == expected.tokens.tolist()
    assert torch.equal(actual.logits, expected.logits)
    assert (actual.log_sum_exps is not None) == with_log_sum_exp
    if actual.log_sum_exps is not None and expected.log_sum_exps is not None:
        assert_close(actual.log_sum_exps, expected.log_sum_exps)


def test_rows_that_are_not_finite_are_seen(device):
    logits = random_logits(4, 300, device)
    logits[0, 200], logits[1, 7], logits[2] = torch.nan, torch.inf, -torch.inf
    found = likeliest_tokens_triton(logits, True)
    assert found.logits.isfinite().tolist() == [False, False, False, True]
    assert all(0 <= token < 300 for token in found.tokens.tolist())


@pytest.mark.parametrize("pairs", [0, 1, 300])
def test_penalties(pairs, device):
    generator = torch.Generator().manual_seed(pairs)
    logits = random_logits(7, 97, device)
    logits[3] = -torch.inf
    places = torch.randperm(7 * 97, generator=generator)[:pairs].to(device)
    counts = torch.randint(0, 4, (pairs,), generator=generator).to(device)
    penalties = (torch.rand(3, pairs, generator=generator) + 0.5).to(device)
    arguments = (places // 97, places % 97, counts, *penalties)
    expected = logits.cpu().clone()
    penalize_(expected, *(each.cpu() for each in arguments))
    penalize_triton(logits, *arguments)
    assert_close(logits.cpu(), expected)


def test_on_a_gpu_penalties_are_the_kernels(monkeypatch, device):
    """The kernel alone asks for its counts in 64 bits."""
    monkeypatch.setattr(penalties, "runs_triton", lambda tensor: True)
    rows, ones = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(1, device=device)
    arguments = (rows, rows, rows.int(), ones, ones, ones)
    with pytest.raises(ValueError, match=r"counts \(1,\) is int32, and must be int64"):
        penalize_(random_logits(1, 5, device), *arguments)
    penalize_(random_logits(1, 5, device).double(), *arguments)


@pytest.mark.parametrize("apply", [apply_bit_mask, apply_bit_mask_reference, apply_bit_mask_triton])
@pytest.mark.parametrize("vocab_size", [1, 32, 33, 5001])
def test_a_bit_mask(vocab_size, apply, triton_dtype, device):
    logits = random_logits(3, vocab_size, device).to(triton_dtype)
    generator = torch.Generator().manual_seed(1)
    mask = torch.randint(-(2**31), 2**31, (3, -(-vocab_size // 32)), generator=generator, dtype=torch.int32).to(device)
    mask[0, ::2], mask[1, 1::2] = 0, -1
    allowed = [[bool(mask[row, token // 32] >> token % 32 & 1) for token in range(vocab_size)] for row in range(3)]
    expected = logits.masked_fill(~torch.tensor(allowed, device=device), -torch.inf)
    apply(logits, mask)
    assert torch.equal(logits, expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(8)}, r"logits \(8,\) must have the shape \[any, any\]"),
        ({"logits": torch.zeros(2, 8, dtype=torch.float64)}, r"logits \(2, 8\) is float64"),
        ({"logits": torch.zeros(8, 2).T}, r"logits \(2, 8\) must be contiguous in its last dimension"),
        ({"top_k": torch.zeros(2)}, r"top_k \(2,\) is float32, and must be int64"),
        ({"top_p": torch.zeros(3).double()}, r"top_p \(3,\) must have the shape \[2\]"),
        ({"uniforms": torch.zeros(2)}, r"uniforms \(2,\) is float32, and must be float64"),
        ({"min_p": torch.zeros(2, device="meta").double()}, r"min_p \(2,\) is on meta"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, message, device):
    names = ("temperature", "top_k", "top_p", "min_p", "uniforms")
    arguments = {
        "logits": torch.zeros(2, 8),
        **dict(zip(names, parameters(2, torch.device("cpu")), strict=True)),
        **change,
    }
    with pytest.raises(ValueError, match=message):
        sample_tokens_triton(
            **{name: tensor if tensor.is_meta else tensor.to(device) for name, tensor in arguments.items()}
        )


def test_a_bit_mask_of_the_wrong_width_is_named(device):
    with pytest.raises(ValueError, match=r"bit_mask \(1, 1\) must have the shape \[1, 2\]"):
        apply_bit_mask_triton(torch.zeros(1, 33, device=device), torch.zeros(1, 1, dtype=torch.int32, device=device))


PENALTIES = {
    **{name: torch.zeros(3, dtype=torch.int64) for name in ("rows", "tokens", "counts")},
    **{name: torch.ones(3) for name in ("repetition", "presence", "frequency")},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 8).half()}, r"logits \(2, 8\) is float16, and must be float32"),
        ({"logits": torch.zeros(2, 0)}, r"logits \(2, 0\) must have a column for each token"),
        ({"rows": torch.zeros(3, 1, dtype=torch.int64)}, r"rows \(3, 1\) must have the shape \[any\]"),
        ({"tokens": torch.zeros(2, dtype=torch.int64)}, r"tokens \(2,\) must have the shape \[3\]"),
        ({"counts": torch.zeros(3)}, r"counts \(3,\) is float32, and must be int64"),
        ({"presence": torch.ones(3).double()}, r"presence \(3,\) is float64, and must be float32"),
        ({"frequency": torch.ones(3, device="meta")}, r"frequency \(3,\) is on meta"),
    ],
)
def test_penalties_that_do_not_fit_are_named(change, message, device):
    arguments = {"logits": torch.zeros(2, 8), **PENALTIES, **change}
    with pytest.raises(ValueError, match=message):
        penalize_triton(**{name: tensor if tensor.is_meta else tensor.to(device) for name, tensor in arguments.items()})


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(8), r"logits \(8,\) must have the shape"),
        (torch.zeros(2, 8).int(), r"logits \(2, 8\) is int32"),
        (torch.zeros(8, 2).T, r"logits \(2, 8\) must be contiguous in its last dimension"),
        (torch.zeros(2, 0), r"logits \(2, 0\) must have a column"),
    ],
)
def test_logits_that_have_no_largest_are_named(logits, message, device):
    with pytest.raises(ValueError, match=message):
        likeliest_tokens_triton(logits.to(device), True)


def test_seeds_and_counters_that_do_not_fit_are_named(device):
    seeds = torch.zeros(3, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"seeds \(3,\) is int32, and must be int64"):
        philox_uniform_triton(seeds.int(), seeds)
    with pytest.raises(ValueError, match=r"counters \(2,\) must have the shape \[3\]"):
        philox_uniform_triton(seeds, seeds[:2])


def test_a_compiled_kernel_wants_a_gpu(monkeypatch):
    """As outside of the interpreter."""
    monkeypatch.setattr(triton.runtime, "JITFunction", type(likeliest_kernel))
    with pytest.raises(ValueError, match=r"logits \(2, 8\) is on cpu; a Triton kernel needs it on a CUDA GPU"):
        likeliest_tokens_triton(torch.zeros(2, 8), False)
