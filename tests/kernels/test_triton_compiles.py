"""The Triton kernels compile for an H200 and for GPUs with less, on a machine that need not have one."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.kernels.paged_attention.kernel_shapes import KernelShape

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

HERE = Path(__file__).parent
RECORD = HERE / "compiled.json"

# Not in every step, or after what torch launches.
LATE_KERNELS = {"bit_mask_kernel", "copy_blocks_kernel", "penalize_kernel", "sample_kernel", "uniform_kernel"}


def launched_kernels() -> set[str]:
    """The kernels that the wrappers launch, by name."""
    kernels = HERE.parents[1] / "kernels"
    wrappers = [file.read_text() for name in ("triton", "hopper") for file in kernels.glob(f"*/{name}.py")]
    return {name for text in wrappers for name in re.findall(r"(\w+_kernel)(?:\[|, x,|,\s+\()", text)}


@pytest.fixture
def compiled(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """What `compile_kernels.py` says when it is given these arguments.

    It compiles what is not in the record of those that were compiled before, and all with `--compile-kernels`.
    """
    how = "write" if request.config.getoption("--compile-kernels") else "read"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    # Where the package is not installed.
    environment["PYTHONPATH"] = str(HERE.parents[1] / "typings")

    def compile_kernels(*arguments: str) -> list[dict[str, Any]]:
        done = subprocess.run(
            [sys.executable, HERE / "compile_kernels.py", "--record", how, *arguments],
            env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found = [json.loads(line) for line in done.stdout.splitlines()]
        is_kept = how == "read" and json.loads(RECORD.read_text())["triton"] == version("triton")
        new = {each["kernel"] for each in found if each["is_new"] and is_kept}
        assert not new, f"compile them all once more, with --compile-kernels: {sorted(new)} are not as in {RECORD.name}"
        return found

    return compile_kernels


def assert_fits(found: list[dict[str, Any]]) -> None:
    assert not [each for each in found if each["shared_bytes"] > each["limit"]]


def test_every_kernel_compiles_and_fits_into_shared_memory(compiled):
    found = compiled("attention", "gated_delta", "linear", "lora", "mamba2", "moe", "rest")
    assert {each["kernel"] for each in found} == launched_kernels()
    assert_fits(found)
    assert not [each["kernel"] for each in found if each["fuses"] or each.get("cuts", False)]
    assert not [(each["kernel"], each["unwritten"]) for each in found if each["unwritten"]]
    # What begins early waits before it touches memory, or once it is done, where what is before it writes elsewhere.
    assert {each["kernel"] for each in found if "launch_pdl" not in each} == LATE_KERNELS
    assert not [each["kernel"] for each in found if "launch_pdl" in each and not each["waits"]]


def test_float32_is_not_cut_to_tf32_where_triton_would(compiled):
    """For a B200, had a product of float32 what is unpacked from four bits as its first factor."""
    found = compiled("--cards", "B200", "wide_from_narrow")
    assert {each["kernel"] for each in found if "cuts" in each} == {"int4_linear_kernel", "int4_experts_kernel"}
    assert not [each["kernel"] for each in found if each.get("cuts", False)]


def test_gpus_with_less_shared_memory(compiled):
    """Every head size, dtype and card is compiled by hand: see `compile_kernels.py`."""
    found = compiled("--cards", "A100,L4,RTX5090", "tightest")
    assert {each["card"] for each in found} == {"A100", "L4", "RTX5090"}
    assert not [each["card"] for each in found if "launch_pdl" in each]
    assert_fits(found)
    # Others need so little that they are compiled for one card.
    everywhere = {each["kernel"] for each in found if each["card"] != "L4"}
    assert all(each["shared_bytes"] <= 2**15 for each in found if each["kernel"] not in everywhere)
    # What shapes are chosen by is no less than what they take.
    attending = [each for each in found if each["kernel"] == "attend_kernel"]
    assert attending
    for each in attending:
        shape = KernelShape(each["ROWS"], each["TILE"], each["num_warps"], each["num_stages"], 1, 255)
        assert each["shared_bytes"] <= shape.shared_bytes(each["HEAD_DIM"], torch.bfloat16, each["KEY_REST"])
