"""Tokens that see those behind them too, beside others that do not: against the reference, and that against torch's."""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from headrace.kernels.kv_cache.fp8 import UNSCALED
from headrace.kernels.paged_attention import (
    AttentionMetadata,
    Span,
    paged_attention,
    paged_attention_reference,
    two_way,
)

from .attention_cases import MIXED, Case
from .fp8_cases import SCALES, in_fp8, with_nan_beyond
from .tolerances import DTYPES, assert_close

# Of the fourth sequence two, the last of which ends before its last token; of the seventh all that is new, where there
# are windows.
PLACES = ((3, 2, 9, False), (3, 20, 12, False), (6, 0, 17, True))


def with_spans(case: Case) -> Case:
    layout = case.metadata
    spans = [
        Span(
            layout.query_starts[row] + first,
            length,
            layout.context_lens[row] - layout.query_lens[row] + first + length,
            layout.block_tables[row],
            in_windows,
        )
        for row, first, length, in_windows in PLACES
    ]
    return replace(case, metadata=replace(layout, spans=spans))


@pytest.mark.parametrize("window", [None, 5])
def test_the_reference_is_attention_with_a_mask(window):
    """One sequence whose blocks lie in order, of which four tokens are computed already."""
    length, heads, dim = 40, 4, 16
    keys, values, queries = torch.randn(3, length, heads, dim, generator=torch.Generator().manual_seed(0))
    table = list(range(5))
    layout = AttentionMetadata([length - 4], [length], [table], 8, spans=[Span(6, 20, 30, table)])
    actual = paged_attention_reference(
        queries[4:], keys.view(5, 8, heads, dim), values.view(5, 8, heads, dim), layout, 0.3, window
    )
    distance = torch.arange(length).unsqueeze(1) - torch.arange(length)
    visible = distance >= 0
    visible[10:30, 10:30] = True
    visible &= distance < (window or length)
    q, k, v = (tensor.transpose(0, 1) for tensor in (queries, keys, values))
    assert_close(actual, scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=0.3).transpose(0, 1)[4:])


@pytest.mark.parametrize("has_more", [False, True], ids=["plain", "capped and with sinks"])
@pytest.mark.parametrize("window", [None, 5, 13, 1000])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float8_e4m3fn], ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_against_the_reference(dtype, window, has_more, monkeypatch):
    # Some queries of a span after the others.
    monkeypatch.setattr(two_way, "_MAX_SCORES", 700)
    is_fp8 = dtype == torch.float8_e4m3fn
    case = with_spans(Case.build(replace(MIXED, num_heads=6), torch.float32 if is_fp8 else dtype))
    if is_fp8:
        case = with_nan_beyond(in_fp8(case, dtype))
    sinks = torch.randn(6, generator=torch.Generator().manual_seed(8)) if has_more else None
    given = case.query, case.key_cache, case.value_cache, case.metadata, case.scale
    more = window, 3.0 if has_more else None, SCALES if is_fp8 else UNSCALED, sinks
    assert_close(paged_attention(*given, *more), paged_attention_reference(*given, *more))


@pytest.mark.parametrize("window", [None, 1000])
def test_nobody_else_sees_more(window):
    case = Case.build(MIXED)
    is_other = (with_spans(case).run(window) - case.run(window)).abs().flatten(1).amax(1) > 1e-4
    expected = torch.zeros_like(is_other)
    for span in with_spans(case).metadata.spans[: 2 if window is None else 3]:
        # Behind the last one of each is nothing of it.
        expected[span.start : span.start + span.length - 1] = True
    assert is_other.tolist() == expected.tolist()
