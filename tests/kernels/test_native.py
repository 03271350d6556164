"""Whether the compiled kernels are there where they should be, and step aside where they cannot run."""

import platform
import shutil
import subprocess
import sys

import pytest
import torch

from headrace.kernels.native import InstructionSet, instruction_set, native_library, runs_native
from headrace.kernels.native.signatures import SIGNATURES

_HAS_BF16 = platform.machine() == "x86_64" and torch.cpu._is_avx512_bf16_supported()


@pytest.mark.skipif(not (_HAS_BF16 and shutil.which("g++")), reason="needs a compiler and AVX-512 with bfloat16")
def test_are_built_where_a_compiler_and_the_processor_allow():
    assert native_library() is not None
    assert instruction_set() >= InstructionSet.AVX512_BF16


@pytest.mark.skipif(native_library() is None, reason="needs the compiled kernels")
def test_take_dense_bfloat16_alone():
    x = torch.zeros(4, 8, dtype=torch.bfloat16)
    assert runs_native(x, x[:, :3])
    assert not runs_native(x.t())
    assert not runs_native(x, x.float())


@pytest.mark.skipif(native_library() is None, reason="needs the compiled kernels")
def test_of_another_version_are_left_alone(monkeypatch, caplog):
    monkeypatch.setitem(SIGNATURES, "headrace_of_tomorrow", "p")
    assert native_library.__wrapped__() is None
    assert "install headrace again" in caplog.text


def test_can_be_switched_off():
    code = "from headrace.kernels.native import native_library; print(native_library())"
    result = subprocess.run(
        [sys.executable, "-c", code], env={"HEADRACE_NATIVE_KERNELS": "0"}, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "None"
