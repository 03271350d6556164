"""The kernels for AVX-512 and AMX where the processor has neither: their own tests, in `emulation/`."""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.kernels.native import InstructionSet, _library_file, instruction_set

TESTS = Path(__file__).parents[1]
SOURCES = TESTS.parent / "kernels" / "native" / "src"
EMULATION = Path(__file__).with_name("emulation")
# These need no emulation, and tell of the real processor.
INSTALLED = {"float32_product", "float32_rows", "grouped_product", "int8_avx2", "platform"}
FLAGS = (
    *("-std=c++17", "-Og", "-mavx2", "-mfma", "-fopenmp", "-fvisibility=hidden", "-fno-math-errno", "-fPIC"),
    *("-Wno-psabi", "-Wno-ignored-attributes", "-isystem", EMULATION, "-c"),
)

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="links libraries as Linux does"),
    pytest.mark.skipif(instruction_set() is not InstructionSet.AVX2, reason="for processors with AVX2 and no AVX-512"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs a compiler"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels, those in `INSTALLED` as they are."""
    folder, installed = tmp_path_factory.mktemp("emulated"), _library_file()
    assert installed is not None
    sources = [source for source in SOURCES.glob("*.cpp") if source.stem not in INSTALLED]
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda source: compiled(source, folder), [*sources, EMULATION / "platform.cpp"]))
    result = folder / "kernels.so"
    run("g++", "-shared", *objects, "-o", result, "-Wl,--no-as-needed", installed)
    return result


def compiled(source: Path, folder: Path) -> Path:
    result = folder / f"{source.stem}.o"
    run("g++", *FLAGS, source, "-o", result)
    return result


def run(*command: str | Path, **environment: str) -> str:
    result = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("level", "choice", "files"),
    [
        (
            InstructionSet.AVX512_BF16,
            "pairs or avx512 or (close_to_float32 and gemma)",
            ("kernels/test_linear.py", "kernels/test_grouped_linear.py", "engine/models/test_models.py"),
        ),
        (
            InstructionSet.AMX,
            "not AVX2 and not test_sizes and (nested or not test_batches)"
            " and not three-threads and not 0.5 and not 50.0",
            (
                *("kernels/test_native_attention.py", "kernels/test_int8_linear.py", "kernels/test_gates.py"),
                *("kernels/test_norm_rotary.py", "kernels/test_likeliest.py", "kernels/test_native_gated_delta.py"),
                *("kernels/test_native_causal_conv.py", "kernels/test_native_mamba2.py"),
            ),
        ),
    ],
    ids=["AVX512_BF16", "AMX"],
)
def test_their_own_tests_pass(library: Path, level: InstructionSet, choice: str, files: tuple[str, ...]):
    """What is left out of them differs in sizes, or is what any processor runs."""
    plugins = ("-p", "emulated_kernels", "-p", "no:xdist", "-p", "no:cacheprovider")
    path = os.pathsep.join(filter(None, [str(EMULATION), os.environ.get("PYTHONPATH")]))
    emulated = {"HEADRACE_TESTS_LIBRARY": str(library), "HEADRACE_TESTS_EMULATE": str(int(level)), "PYTHONPATH": path}
    command = (sys.executable, "-m", "pytest", "-q", *plugins, "-k", choice)
    output = run(*command, *(TESTS / file for file in files), **emulated)
    assert " passed" in output
    assert "needs the compiled kernels" not in output
