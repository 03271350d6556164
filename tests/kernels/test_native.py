"""Whether the compiled kernels are there where they should be, and step aside where they cannot run."""

import platform
import shutil
import subprocess
import sys

import pytest
import torch

from headrace.kernels.native import InstructionSet, has_bfloat16, instruction_set, native_library, runs_native
from headrace.kernels.native.signatures import SIGNATURES

_IS_X86 = platform.machine() == "x86_64"


@pytest.mark.skipif(not (_IS_X86 and shutil.which("g++")), reason="needs a compiler and an x86 processor")
def test_are_built_where_a_compiler_and_the_processor_allow():
    if torch.cpu._is_avx512_bf16_supported():
        assert instruction_set() >= InstructionSet.AVX512_BF16
    elif torch.cpu._is_vnni_supported():
        assert instruction_set() is InstructionSet.AVX512
    elif torch.cpu._is_avx2_supported():
        assert instruction_set() is InstructionSet.AVX2


@pytest.mark.skipif(native_library() is None, reason="needs the compiled kernels")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_take_dense_tensors_of_one_dtype(dtype):
    if dtype == torch.bfloat16 and not has_bfloat16():
        pytest.skip("needs AVX-512 with bfloat16")
    x = torch.zeros(4, 8, dtype=dtype)
    assert runs_native(x, x[:, :3])
    assert not runs_native(x.t())
    assert not runs_native(x, x.half())


def test_float16_has_none():
    assert not runs_native(torch.zeros(4, 8, dtype=torch.float16))


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
