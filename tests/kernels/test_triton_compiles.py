"""The Triton kernels compile for an H200, on a machine that need not have one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

HERE = Path(__file__).parent
# What a program may have on Hopper.
MAX_SHARED_BYTES = 227 * 1024


def launched_kernels() -> set[str]:
    """The kernels that the wrappers launch, by name."""
    wrappers = [file.read_text() for file in (HERE.parents[1] / "kernels").glob("*/triton.py")]
    return {name for text in wrappers for name in re.findall(r"(\w+_kernel)\[", text)}


def test_every_kernel_compiles_and_fits_into_shared_memory(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, HERE / "compile_kernels.py"],
        env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled = [json.loads(line) for line in done.stdout.splitlines()]
    assert {each["kernel"] for each in compiled} == launched_kernels()
    assert max(each["shared_bytes"] for each in compiled) <= MAX_SHARED_BYTES
