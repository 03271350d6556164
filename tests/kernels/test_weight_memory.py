"""Weights lie one after the other in large pages, aligned, and none in another's place."""

import re
from pathlib import Path

import pytest
import torch

from headrace.kernels.weight_memory import empty_weight

CPU = torch.device("cpu")
_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_weights_do_not_overlap():
    shapes = [(3, 5), (64, 64), (1,), (0, 7), (300, 1000), (17, 33)]
    weights = [empty_weight(shape, dtype, CPU) for shape in shapes for dtype in (torch.bfloat16, torch.int8)]
    for number, weight in enumerate(weights):
        weight.fill_(number)
    for number, weight in enumerate(weights):
        assert bool((weight == number).all())
        assert weight.data_ptr() % 64 == 0 or not weight.numel()
    assert [tuple(weight.shape) for weight in weights[::2]] == shapes


def test_one_larger_than_what_is_taken_at_a_time():
    large = empty_weight((9, 1024, 1024), torch.float32, CPU)
    large[-1] = 2
    assert large.shape == (9, 1024, 1024)
    assert bool((large[-1] == 2).all())


def test_other_devices_have_memory_of_their_own():
    weight = empty_weight((4, 6), torch.float16, torch.device("meta"))
    assert (weight.shape, weight.dtype, weight.device.type) == ((4, 6), torch.float16, "meta")


@pytest.mark.skipif(not _SWITCH.exists() or "[never]" in _SWITCH.read_text(), reason="the system has no such pages")
def test_the_system_is_asked_for_large_pages():
    weight = empty_weight((2048, 2048), torch.float32, CPU)
    assert "hg" in _flags(weight.data_ptr())


def test_a_large_weight_shares_its_memory_with_none():
    """So that it is given back with it. (To whom is not asked: engines have malloc keep what is freed.)"""
    large, small = (empty_weight((size, 1024, 1024), torch.uint8, CPU) for size in (40, 1))
    memory = large.untyped_storage()
    assert large.numel() <= memory.nbytes() <= large.numel() + 2 * 2**20
    assert not memory.data_ptr() <= small.data_ptr() < memory.data_ptr() + memory.nbytes()
    assert small.untyped_storage().nbytes() > small.numel()


def _flags(address: int) -> list[str]:
    """What the system knows of the memory at an address; nothing where there is none."""
    for part in re.split(r"(?m)^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text())[1:]:
        first, last = (int(number, 16) for number in part.split(" ", 1)[0].split("-"))
        if first <= address < last:
            return part.partition("VmFlags:")[2].split()
    return []
