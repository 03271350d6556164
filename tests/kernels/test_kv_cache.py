"""Keys and values on their way into the paged cache."""

import pytest
import torch
from torch import Tensor

from headrace.kernels.kv_cache import PADDING_SLOT, write_kv

BLOCKS, BLOCK_SIZE, HEADS, DIM = 5, 4, 3, 6


def caches() -> tuple[Tensor, Tensor]:
    key_cache, value_cache = torch.full((2, BLOCKS, BLOCK_SIZE, HEADS, DIM), float("nan"))
    return key_cache, value_cache


def test_each_token_lands_in_its_slot_and_nothing_else_is_touched():
    key, value = torch.randn(2, 4, HEADS, DIM)
    key_cache, value_cache = caches()
    slots = [19, 0, 6, 5]
    write_kv(key, value, key_cache, value_cache, torch.tensor(slots))
    for new, cache in ((key, key_cache), (value, value_cache)):
        for token, slot in enumerate(slots):
            block, offset = divmod(slot, BLOCK_SIZE)
            assert torch.equal(cache[block, offset], new[token])
        assert int(cache.isnan().all(-1).all(-1).sum()) == BLOCKS * BLOCK_SIZE - len(slots)


def test_padding_is_not_kept():
    key, value = torch.randn(2, 4, HEADS, DIM)
    key_cache, value_cache = caches()
    write_kv(key, value, key_cache, value_cache, torch.tensor([PADDING_SLOT, 7, PADDING_SLOT, 3]))
    for new, cache in ((key, key_cache), (value, value_cache)):
        written = cache.flatten(0, 1)
        assert torch.equal(written[[7, 3]], new[[1, 3]])
        assert int(written.isnan().all(-1).all(-1).sum()) == BLOCKS * BLOCK_SIZE - 2


def test_no_tokens_no_change():
    key_cache, value_cache = caches()
    write_kv(torch.empty(0, HEADS, DIM), torch.empty(0, HEADS, DIM), key_cache, value_cache, torch.empty(0).long())
    assert bool(key_cache.isnan().all())
    assert bool(value_cache.isnan().all())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": torch.zeros(2, HEADS, DIM + 1)}, "key"),
        ({"value": torch.zeros(3, HEADS, DIM)}, "value"),
        ({"key": torch.zeros(2, 1, DIM), "value": torch.zeros(2, 1, DIM)}, "as the cache is"),
        ({"slots": torch.zeros(3, dtype=torch.int64)}, r"slots \(3,\) must be \[2\]"),
        ({"value_cache": torch.zeros(BLOCKS, BLOCK_SIZE, HEADS + 1, DIM)}, "value_cache"),
        ({"key": torch.zeros(2, HEADS, DIM, dtype=torch.float16)}, "float16"),
    ],
)
def test_arguments_that_do_not_fit_are_named(changes, message):
    key_cache, value_cache = caches()
    arguments = {
        "key": torch.zeros(2, HEADS, DIM),
        "value": torch.zeros(2, HEADS, DIM),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slots": torch.tensor([1, 2]),
    }
    with pytest.raises(ValueError, match=message):
        write_kv(**{**arguments, **changes})
    assert bool(key_cache.isnan().all())
