"""KV blocks copied to other blocks, and out to the host and back."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

from headrace.kernels.kv_cache.block_copy import copy_blocks, copy_blocks_reference, swap_in, swap_out
from headrace.kernels.kv_cache.triton import copy_blocks_triton


def cache(dtype: torch.dtype, device: torch.device, head_dim: int = 17) -> Tensor:
    return torch.randn(2, 3, 7, 4, 2, head_dim).to(device, dtype)


@pytest.mark.parametrize("copy", [copy_blocks, copy_blocks_reference, copy_blocks_triton])
@pytest.mark.parametrize(
    ("sources", "destinations"), [([], []), ([6], [0]), ([1, 1, 2], [4, 5, 0])], ids=["none", "one", "fork"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_copied_blocks_are_equal_and_the_others_untouched(dtype, sources, destinations, copy, device):
    before = cache(dtype, device)
    after = before.clone()
    pair = [torch.tensor(blocks, dtype=torch.int64, device=device) for blocks in (sources, destinations)]
    copy(after, *pair)
    origin = list(range(7))
    for source, destination in zip(sources, destinations, strict=True):
        origin[destination] = source
    assert torch.equal(bits(after), bits(before)[:, :, origin])


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8)


@pytest.mark.parametrize("head_dim", [16, 17])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_blocks_swapped_out_come_back_anywhere(dtype, head_dim, device):
    kv_cache = cache(dtype, device, head_dim)
    before = kv_cache.clone()
    held = swap_out(kv_cache, torch.tensor([5, 1], device=device))
    assert held.device.type == "cpu"
    bits(kv_cache)[:, :, [5, 1]] = 0
    swap_in(kv_cache, torch.tensor([1, 3], device=device), held)
    assert torch.equal(bits(kv_cache)[:, :, [1, 3]], bits(before)[:, :, [5, 1]])
    assert torch.equal(bits(kv_cache)[:, :, [0, 2, 4, 6]], bits(before)[:, :, [0, 2, 4, 6]])
    swap_in(kv_cache, torch.tensor([6], device=device), held, first=1)
    assert torch.equal(bits(kv_cache)[:, :, 6], bits(before)[:, :, 1])


def test_what_does_not_fit_is_named(device):
    kv_cache = cache(torch.float32, device)
    one, two = torch.tensor([1], device=device), torch.tensor([2, 3], device=device)
    with pytest.raises(ValueError, match=r"held \(2, 3, 1, 4, 2, 17\) is torch.float32; must have 2 blocks"):
        swap_in(kv_cache, two, swap_out(kv_cache, one))
    with pytest.raises(ValueError, match=r"destinations \(2,\) must have the shape \[1\]"):
        copy_blocks_triton(kv_cache, one, two)
    with pytest.raises(ValueError, match=r"sources \(1,\) is int32, and must be int64"):
        copy_blocks_triton(kv_cache, one.int(), one)
    with pytest.raises(ValueError, match=r"kv_cache \(2, 3, 7, 2, 4, 17\) must be contiguous"):
        copy_blocks_triton(kv_cache.transpose(3, 4), one, one)
    with pytest.raises(ValueError, match=r"kv_cache \(2, 3, 7, 4, 2, 17\) is float64, and must be float32 or"):
        copy_blocks_triton(kv_cache.double(), one, one)


class MovesWhole(TorchFunctionMode):
    """Refuses to cut what is on the host: a device may still be writing there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to:
            assert args[0].is_contiguous()
        return func(*args, **kwargs or {})


def test_what_is_swapped_in_from_some_block_on_is_moved_whole(device):
    kv_cache = cache(torch.float16, device)
    before = kv_cache.clone()
    held = swap_out(kv_cache, torch.tensor([5, 1, 2], device=device))
    with MovesWhole():
        swap_in(kv_cache, torch.tensor([0, 6], device=device), held, 1)
    assert torch.equal(kv_cache[:, :, [0, 6]], before[:, :, [1, 2]])
    with pytest.raises(ValueError, match=r"must have 2 blocks of torch\.float16 from its block 2 on"):
        swap_in(kv_cache, torch.tensor([0, 6], device=device), held, 2)
