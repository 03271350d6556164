"""Kernels are assembled by the newer of what comes with Triton, where the driver loads what that makes."""

import re
from types import SimpleNamespace

import pytest

triton = pytest.importorskip("triton", reason="there is nothing to choose without it")

from headrace.kernels import triton_assembler
from headrace.kernels.triton_assembler import cuda_of_driver, use_newer_assembler, why_hopper_is_assembled_wrongly


@pytest.fixture
def tools(monkeypatch) -> SimpleNamespace:
    """Triton's settings, with tools that nobody starts."""
    nvidia = SimpleNamespace(ptxas=tool("12.8"), ptxas_blackwell=tool("13.1"))
    monkeypatch.setattr(triton, "knobs", SimpleNamespace(nvidia=nvidia), raising=False)
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    return nvidia


def tool(version: str) -> SimpleNamespace:
    return SimpleNamespace(path=f"/bin/ptxas-{version}", version=version)


@pytest.mark.parametrize(("other", "driver"), [("13.1", 13), ("12.9", 12), ("12.10", 13)])
def test_the_newer_is_taken(tools, other, driver):
    tools.ptxas_blackwell = tool(other)
    use_newer_assembler(driver)
    assert tools.ptxas == f"/bin/ptxas-{other}"


def test_a_driver_that_is_older_would_not_load_what_it_makes(tools):
    use_newer_assembler(12)
    assert tools.ptxas == tool("12.8")


def test_the_usual_one_stays_where_it_is_as_new(tools):
    tools.ptxas = tool("13.1")
    use_newer_assembler(13)
    assert tools.ptxas == tool("13.1")


def test_the_users_own_is_left_alone(tools, monkeypatch):
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/usr/local/cuda/bin/ptxas")
    use_newer_assembler(13)
    assert tools.ptxas == tool("12.8")


def test_a_triton_without_it(tools, monkeypatch):
    del tools.ptxas_blackwell
    use_newer_assembler(13)
    assert tools.ptxas == tool("12.8")
    monkeypatch.delattr(triton, "knobs")
    use_newer_assembler(13)


@pytest.mark.parametrize(("version", "is_right"), [("12.8", False), ("12.9", True), ("13.1", True)])
def test_what_hopper_is_not_to_be_assembled_with_is_told_with_what_helps(tools, version, is_right, monkeypatch):
    tools.ptxas, tools.ptxas_blackwell = tool(version), tool("14.0")
    monkeypatch.setattr(triton_assembler, "cuda_of_driver", lambda: (12, 0))
    problem = why_hopper_is_assembled_wrongly()
    if is_right:
        assert problem is None
        return
    assert problem is not None
    assert re.search(r"of CUDA 12\.8 makes wrong .* driver to 580 or newer, or set TRITON_PTXAS_PATH .* 12\.9", problem)
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/usr/local/cuda/bin/ptxas")
    assert why_hopper_is_assembled_wrongly() is None


def test_the_driver_is_asked_without_touching_a_gpu():
    assert cuda_of_driver() >= (0, 0)
