"""What the GPU's benchmark times goes into CUDA graphs, unless it says that it waits for the device."""

from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the simulated GPU interprets Triton's kernels")

from ..engine.execution.simulated_gpu import simulated_gpu

FOLDER = Path(__file__).parents[2] / "benchmarks"


def lines_of(part: str, sizes: Any, limits: Any) -> Iterable[Any]:
    kernels, linears, lora, mixtures, small = (
        import_module(f"gpu_{name}") for name in ("kernels", "linears", "lora", "mixtures", "small")
    )
    lines: Iterable[Any] = {
        "limits": lambda: kernels.limit_lines(sizes)[1],
        "linears": lambda: linears.linear_lines(sizes, limits),
        "kernels": lambda: small.small_lines(sizes, limits),
        "lora": lambda: lora.lora_lines(sizes),
        "mixtures": lambda: mixtures.mixture_lines(sizes, mixtures.DRY, limits),
    }[part]()
    return list(lines)


@pytest.mark.parametrize("part", ["limits", "linears", "kernels", "lora", "mixtures"])
def test_a_part_is_measured_to_its_end(part, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    kernels = import_module("gpu_kernels")
    sizes = replace(kernels.DRY, device=torch.device("cuda"))
    with simulated_gpu(monkeypatch):
        lines = lines_of(part, sizes, kernels.Limits(1e12, 1e14))
    assert lines
