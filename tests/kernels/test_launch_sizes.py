"""Grids and tiles are of the sizes that Triton's own functions give, and are not asked of those."""

import re
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

from headrace.kernels.launch_sizes import cdiv, next_power_of_2

KERNELS = Path(__file__).parents[2] / "kernels"
# What runs on a GPU has nothing else.
LAUNCHERS = sorted(file for file in KERNELS.rglob("*.py") if file.name != "triton_kernels.py")


@pytest.mark.parametrize("number", [0, 1, 2, 3, 7, 8, 9, 896, 1024, 151_936, 2**31 - 1])
def test_sizes_are_tritons(number):
    assert next_power_of_2(number) == triton.next_power_of_2(number)
    for unit in (1, 2, 7, 64):
        assert cdiv(number, unit) == triton.cdiv(number, unit)


def test_no_launch_waits_for_tritons_own():
    slow = re.compile(r"\btriton\.(cdiv|next_power_of_2)\b")
    assert [file.name for file in LAUNCHERS if slow.search(file.read_text(encoding="utf-8"))] == []
