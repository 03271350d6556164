"""Which machines run the Triton kernels. No GPU is at hand, so what torch would say of one is set."""

from collections.abc import Iterator

import pytest
import torch

from headrace.kernels import device
from headrace.kernels.device import UnsupportedGpuError, runs_triton

CACHED = (device._has_triton, device._is_new_enough, device._is_assembled_rightly)


@pytest.fixture
def _uncached() -> Iterator[None]:
    for function in CACHED:
        function.cache_clear()
    yield
    for function in CACHED:
        function.cache_clear()


def test_tensors_on_a_cpu_do_not():
    assert not runs_triton(torch.zeros(1))


@pytest.mark.usefixtures("_uncached")
def test_without_triton_a_gpu_runs_plain_torch_and_says_so_once(monkeypatch):
    monkeypatch.setattr(device, "find_spec", lambda name: None)
    with pytest.warns(RuntimeWarning, match=r"Triton is not installed: .* `pip install triton`") as warned:
        assert [device._has_triton(), device._has_triton()] == [False, False]
    assert len(warned) == 1


@pytest.mark.usefixtures("_uncached")
@pytest.mark.parametrize(("capability", "is_new_enough"), [((7, 5), False), ((8, 0), True), ((9, 0), True)])
def test_a_gpu_that_is_too_old_is_told_what_is_needed(capability, is_new_enough, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda where: "Tesla T4")
    gpu = torch.device("cuda", 0)
    if is_new_enough:
        assert device._is_new_enough(gpu)
    else:
        with pytest.raises(UnsupportedGpuError, match=r"Tesla T4 has compute capability 7\.5; the kernels need 8\.0"):
            device._is_new_enough(gpu)


@pytest.mark.usefixtures("_uncached")
@pytest.mark.parametrize(("capability", "is_refused"), [((8, 9), False), ((9, 0), True), ((10, 0), False)])
def test_a_hopper_whose_kernels_would_be_wrong_is_refused(capability, is_refused, monkeypatch):
    pytest.importorskip("triton", reason="there is nothing to assemble without it")
    from headrace.kernels import triton_assembler

    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(triton_assembler, "why_hopper_is_assembled_wrongly", lambda: "the assembler is old")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda where: capability)
    gpu = torch.device("cuda", 0)
    if is_refused:
        with pytest.raises(UnsupportedGpuError, match="the assembler is old"):
            device._is_assembled_rightly(gpu)
    else:
        assert device._is_assembled_rightly(gpu)
