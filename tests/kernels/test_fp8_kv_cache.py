"""KV caches in 8-bit floats: what is written, and attention over it."""

import pytest
import torch

from headrace.kernels.kv_cache import write_kv
from headrace.kernels.kv_cache.fp8 import FP8_LARGEST, as_stored
from headrace.kernels.paged_attention import paged_attention, paged_attention_reference

from .attention_cases import MIXED, Case
from .fp8_cases import FORMATS, SCALES, in_fp8
from .tolerances import assert_close


@FORMATS
def test_a_written_token_reads_as_it_was_to_the_formats_precision(dtype):
    key, value = torch.randn(2, 5, 2, 16)
    caches = torch.zeros(2, 3, 4, 2, 16, dtype=dtype)
    slots = torch.tensor([11, 0, 7, 4, 2])
    write_kv(key, value, caches[0], caches[1], slots, SCALES)
    precision = torch.finfo(dtype).eps / 2
    for new, cache, scale in zip((key, value), caches, (SCALES.key, SCALES.value), strict=True):
        held = cache.flatten(0, 1).float() * scale
        torch.testing.assert_close(held[slots], new, rtol=precision, atol=2**-8)
        assert int((held != 0).any(-1).any(-1).sum()) == len(slots)


@FORMATS
def test_what_fp8_cannot_reach_is_its_largest_and_nan_stays(dtype):
    x = torch.tensor([1e6, -1e6, torch.inf, torch.nan])
    largest = FP8_LARGEST[dtype]
    assert as_stored(x, dtype, 1.0)[:3].float().tolist() == [largest, -largest, largest]
    assert as_stored(x, dtype, 1.0)[3].float().isnan()


@FORMATS
def test_attention_reads_what_the_cache_stands_for(dtype):
    case = in_fp8(Case.build(MIXED), dtype)
    keys, values = case.key_cache.float() * SCALES.key, case.value_cache.float() * SCALES.value
    expected = paged_attention_reference(case.query, keys, values, case.metadata, case.scale)
    actual = paged_attention(case.query, case.key_cache, case.value_cache, case.metadata, case.scale, kv_scales=SCALES)
    assert_close(actual, expected)


def test_a_cache_of_another_dtype_is_refused():
    key, slots = torch.zeros(1, 2, 16), torch.tensor([0])
    caches = torch.zeros(2, 3, 4, 2, 16, dtype=torch.float8_e5m2)
    with pytest.raises(ValueError, match=r"key_cache torch\.float8_e5m2 and value_cache torch\.float8_e4m3fn"):
        write_kv(key, key, caches[0], caches[1].to(torch.float8_e4m3fn), slots)
