"""Batches whose keys and values are held in 8-bit floats."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.kv_cache import KVScales
from headrace.kernels.kv_cache.fp8 import FP8_LARGEST, as_stored
from headrace.kernels.paged_attention.latent_values import are_parts

from .attention_cases import Case

SCALES = KVScales(key=0.5, value=2.0)
FORMATS = pytest.mark.parametrize("dtype", FP8_LARGEST, ids=lambda dtype: str(dtype).removeprefix("torch.float8_"))


def in_fp8(case: Case, dtype: torch.dtype) -> Case:
    """The same batch with its keys and values in 8 bits."""
    keys = as_stored(case.key_cache, dtype, SCALES.key)
    if are_parts(case.key_cache, case.value_cache):
        return Case(case.query, keys, keys[..., : case.value_cache.shape[3]], case.metadata, case.scale)
    return Case(case.query, keys, as_stored(case.value_cache, dtype, SCALES.value), case.metadata, case.scale)


def with_nan_beyond(case: Case) -> Case:
    """The same batch with a NaN's bits wherever no sequence has a token."""
    block_size, written = case.metadata.block_size, torch.zeros(case.key_cache.shape[:2], dtype=torch.bool)
    for table, length in zip(case.metadata.block_tables, case.metadata.context_lens, strict=True):
        for position in range(length):
            written[table[position // block_size], position % block_size] = True
    for cache in (case.key_cache, case.value_cache):
        cache.view(torch.uint8)[~written.to(cache.device)] = 0x7F
    return case


def representable(*shape: int) -> Tensor:
    """Numbers that FP8 has, as have their halves and doubles: the interpreter rounds others wrongly."""
    return torch.tensor([-2.0, -1.5, -0.5, 0.25, 1.0, 3.0])[torch.randint(6, shape)]
