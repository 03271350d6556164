"""A head's sink takes its share of the softmax and no value: on a CPU, and in the reference."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headrace.kernels import paged_attention as package
from headrace.kernels.kv_cache.fp8 import KVScales
from headrace.kernels.paged_attention import (
    AttentionMetadata,
    paged_attention,
    paged_attention_reference,
    prefix_groups,
)

from .attention_cases import MIXED, Case, Shape
from .shared_prefix_cases import BATCHES, build, tensors
from .tolerances import DTYPES, assert_close

SHAPES = [
    Shape((1,), (1,)),
    Shape((3, 64), (35, 65)),
    MIXED,
    replace(MIXED, num_heads=6, num_kv_heads=2, head_dim=80, block_size=8),
    # gpt-oss' own.
    replace(MIXED, num_heads=64, num_kv_heads=8, head_dim=64),
]


def sinks_for(case: Case) -> Tensor:
    """About as large as scores are, and one of them far above all of these."""
    sinks = torch.randn(case.query.shape[1], generator=torch.Generator().manual_seed(8)) * 2
    sinks[0] = 60.0
    return sinks.to(case.query.device)


def attended(case: Case, sinks: Tensor | None, window: int | None = None, soft_cap: float | None = None) -> Tensor:
    given = case.query, case.key_cache, case.value_cache, case.metadata, case.scale
    return paged_attention(*given, window, soft_cap, sinks=sinks)


def expected(case: Case, sinks: Tensor | None, window: int | None = None, soft_cap: float | None = None) -> Tensor:
    given = case.query, case.key_cache, case.value_cache, case.metadata, case.scale
    return paged_attention_reference(*given, window, soft_cap, sinks=sinks)


@pytest.mark.parametrize("window", [None, 13])
def test_the_reference_is_a_softmax_with_one_more_score(window):
    """One sequence whose blocks lie in order, as transformers computes gpt-oss' attention."""
    length, heads, dim = 40, 4, 16
    keys, values, queries = torch.randn(3, length, heads, dim, generator=torch.Generator().manual_seed(0))
    sinks = torch.tensor([-2.0, 0.0, 1.5, 4.0])
    layout = AttentionMetadata([length], [length], [list(range(5))], 8)
    actual = paged_attention_reference(
        queries, keys.view(5, 8, heads, dim), values.view(5, 8, heads, dim), layout, 0.3, window, sinks=sinks
    )
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * 0.3
    scores = scores.masked_fill((distance < 0) | (distance >= (window or length)), float("-inf"))
    combined = torch.cat([scores, sinks.view(-1, 1, 1).expand(heads, length, 1)], dim=-1)
    weights = combined.softmax(-1)[..., :-1]
    assert_close(actual, torch.einsum("hqk,khd->qhd", weights, values))


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 13, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_the_reference(shape, dtype, window, soft_cap):
    case = Case.build(shape, dtype)
    sinks = sinks_for(case)
    assert_close(attended(case, sinks, window, soft_cap), expected(case, sinks, window, soft_cap))


@pytest.mark.parametrize("name", BATCHES)
def test_beside_a_shared_prefix(name, monkeypatch):
    """The prefix's scores and a sequence's own stand under one softmax, and the sink beside them once."""
    monkeypatch.setattr(package, "takes_native", lambda *_: False)
    monkeypatch.setattr(prefix_groups, "MIN_SPARED_TOKENS", 1)
    layout = build(BATCHES[name], 8)
    case = Case(*tensors(layout, 6, 2, 80, torch.float32), layout, 80**-0.5)
    assert any(group.prefix_blocks is not None for group in layout.shared_groups)
    for soft_cap in (None, 3.0):
        assert_close(attended(case, sinks_for(case), None, soft_cap), expected(case, sinks_for(case), None, soft_cap))


def test_a_cache_in_fp8():
    case = Case.build(MIXED)
    scales, sinks = KVScales(0.5, 0.25), sinks_for(case)
    keys, values = (
        (cache / scale).to(torch.float8_e4m3fn)
        for cache, scale in ((case.key_cache, scales.key), (case.value_cache, scales.value))
    )
    given = case.query, keys, values, case.metadata, case.scale
    actual = paged_attention(*given, kv_scales=scales, sinks=sinks)
    assert_close(actual, paged_attention_reference(*given, kv_scales=scales, sinks=sinks))
    assert not torch.allclose(actual, paged_attention(*given, kv_scales=scales), atol=1e-2)


def test_without_sinks_nothing_is_lost():
    """A sink of minus infinity is none."""
    case = Case.build(replace(MIXED, head_dim=64))
    never = torch.full((case.query.shape[1],), -torch.inf)
    assert_close(attended(case, never), attended(case, None))


@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 13, 1000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_without_the_compiled_kernel(shape, window, soft_cap, monkeypatch):
    monkeypatch.setattr(package, "takes_native", lambda *_: False)
    case = Case.build(shape)
    sinks = sinks_for(case)
    assert_close(attended(case, sinks, window, soft_cap), expected(case, sinks, window, soft_cap))


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (torch.zeros(3), r"sinks \(3,\) must be \[4 heads\]"),
        (torch.zeros(4, 1), r"sinks \(4, 1\) must be \[4 heads\]"),
        (torch.zeros(4, dtype=torch.bfloat16), r"sinks is torch\.bfloat16, and must be torch\.float32"),
        (torch.zeros(4, 2)[:, 0], r"sinks has stride \(2,\), and must be contiguous"),
        (torch.zeros(4, device="meta"), r"sinks is on meta, and must be on cpu"),
    ],
    ids=["number", "shape", "dtype", "stride", "device"],
)
def test_sinks_that_do_not_fit_are_named(sinks, message):
    with pytest.raises(ValueError, match=message):
        attended(Case.build(MIXED), sinks)
