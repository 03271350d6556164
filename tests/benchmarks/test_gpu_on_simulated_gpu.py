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
    module = import_module(f"gpu_{part}")
    if part == "mixtures":
        return list(module.mixture_lines(sizes, module.DRY, limits))
    return list(module.lora_lines(sizes) if part == "lora" else module.linear_lines(sizes, limits))


@pytest.mark.parametrize("part", ["linears", "lora", "mixtures"])
def test_a_part_is_measured_to_its_end(part, monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    kernels = import_module("gpu_kernels")
    sizes = replace(kernels.DRY, device=torch.device("cuda"))
    with simulated_gpu(monkeypatch):
        lines = lines_of(part, sizes, kernels.Limits(1e12, 1e14))
    assert lines
