"""The Triton kernels compile for an H200 and for GPUs with less, on a machine that need not have one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.kernels.paged_attention.kernel_shapes import KernelShape

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

HERE = Path(__file__).parent


# Not in every step, or after what torch launches.
LATE_KERNELS = {"bit_mask_kernel", "copy_blocks_kernel", "penalize_kernel", "sample_kernel", "uniform_kernel"}


def launched_kernels() -> set[str]:
    """The kernels that the wrappers launch, by name."""
    kernels = HERE.parents[1] / "kernels"
    wrappers = [file.read_text() for name in ("triton", "hopper") for file in kernels.glob(f"*/{name}.py")]
    return {name for text in wrappers for name in re.findall(r"(\w+_kernel)(?:\[|, x,|,\s+\()", text)}


def compile_side_by_side(folder: Path, *parts: str) -> list[dict[str, Any]]:
    """What `compile_kernels.py` says of each group of parts, a process a group."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Where the package is not installed.
    environment["PYTHONPATH"] = str(HERE.parents[1] / "typings")
    processes = [
        subprocess.Popen(
            [sys.executable, HERE / "compile_kernels.py", *part.split()],
            env={**environment, "TRITON_CACHE_DIR": str(folder)},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=(folder / f"{part}.err").open("w"),
            text=True,
        )
        for part in parts
    ]
    told = [process.communicate()[0] for process in processes]
    for process, part in zip(processes, parts, strict=True):
        assert process.returncode == 0, (folder / f"{part}.err").read_text()[-3000:]
    return [json.loads(line) for text in told for line in text.splitlines()]


def assert_fits(compiled: list[dict[str, Any]]) -> None:
    assert not [each for each in compiled if each["shared_bytes"] > each["limit"]]


def test_every_kernel_compiles_and_fits_into_shared_memory(tmp_path):
    compiled = compile_side_by_side(tmp_path, "attention", "gated_delta linear lora mamba2 moe rest")
    assert {each["kernel"] for each in compiled} == launched_kernels()
    assert_fits(compiled)
    assert not [each["kernel"] for each in compiled if each["fuses"]]
    assert not [(each["kernel"], each["unwritten"]) for each in compiled if each["unwritten"]]
    # What begins early waits before it touches memory, or once it is done, where what is before it writes elsewhere.
    assert {each["kernel"] for each in compiled if "launch_pdl" not in each} == LATE_KERNELS
    assert not [each["kernel"] for each in compiled if "launch_pdl" in each and not each["waits"]]


def test_gpus_with_less_shared_memory(tmp_path):
    """Every head size, dtype and card is compiled by hand: see `compile_kernels.py`."""
    compiled = compile_side_by_side(tmp_path, "--cards A100,L4,RTX5090 tightest")
    assert {each["card"] for each in compiled} == {"A100", "L4", "RTX5090"}
    assert not [each["card"] for each in compiled if "launch_pdl" in each]
    assert_fits(compiled)
    # Others need so little that they are compiled for one card.
    everywhere = {each["kernel"] for each in compiled if each["card"] != "L4"}
    assert all(each["shared_bytes"] <= 2**15 for each in compiled if each["kernel"] not in everywhere)
    # What shapes are chosen by is no less than what they take.
    attending = [each for each in compiled if each["kernel"] == "attend_kernel"]
    assert attending
    for each in attending:
        shape = KernelShape(each["ROWS"], each["TILE"], each["num_warps"], each["num_stages"], 1, 255)
        assert each["shared_bytes"] <= shape.shared_bytes(each["HEAD_DIM"], torch.bfloat16, each["KEY_REST"])
