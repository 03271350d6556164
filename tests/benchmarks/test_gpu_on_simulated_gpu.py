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


def test_the_host_uploads_once_a_step_and_launches_one_graph(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    engine, host, steps = (import_module(f"gpu_{name}") for name in ("engine", "host", "steps"))
    # One prompt begins at once.
    monkeypatch.setattr(steps, "SPARE_TOKENS", 3)
    work = engine.Workload.shared("gate", 1, 4, 4, 6)
    options = {"max_num_batched_tokens": 8, "cuda_graph_sizes": (1,), "num_gpu_blocks_override": 4}
    with simulated_gpu(monkeypatch):
        llm = engine.load_for("gate", torch.device("cuda"), [work], dtype="float32", **options)
        found = host.decode_steps(llm, work.prompts, 3, torch.cuda.synchronize)
    for step in found:
        titles = [call.title for call in step.calls]
        for title in ("uploading it", "launching the graph", "waiting for the device"):
            assert titles.count(title) == 1
        assert "launching the model without a graph" not in titles
