"""Devices that cannot be used, and what is said of them. No GPU is at hand, so what torch would say of one is set."""

import logging
from collections.abc import Callable

import pytest
import torch

from headrace.engine.errors import ConfigError
from headrace.engine.execution import devices
from headrace.engine.execution.devices import resolve_device
from headrace.kernels.device import UnsupportedGpuError

TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040).\nPlease update your GPU driver."


def raises(error: Exception) -> Callable[..., object]:
    def fail(*arguments: object, **options: object) -> object:
        raise error

    return fail


@pytest.fixture
def _old_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", raises(RuntimeError(TOO_OLD)))
    monkeypatch.setattr(torch.version, "cuda", "12.8")


@pytest.mark.usefixtures("_old_driver")
def test_a_driver_too_old_for_this_torch_is_told_which_is_needed():
    with pytest.raises(ConfigError) as error:
        resolve_device("cuda")
    said = str(error.value)
    assert "found version 11040). Please update" in said
    assert "is for CUDA 12.8, which needs the NVIDIA driver 525.60 or newer" in said
    assert "\n" not in said


@pytest.mark.usefixtures("_old_driver")
@pytest.mark.parametrize("has_driver", [True, False])
def test_a_gpu_that_cannot_be_used_is_not_passed_over_in_silence(has_driver, monkeypatch, caplog, tmp_path):
    file = tmp_path / "version"
    if has_driver:
        file.touch()
    monkeypatch.setattr(devices, "_DRIVER_FILE", file)
    with caplog.at_level(logging.WARNING):
        assert resolve_device("auto") == torch.device("cpu")
    assert [("found version 11040" in message) for message in caplog.messages] == [True] * has_driver


def test_a_torch_for_cpus_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ConfigError, match="is built for CPUs; install a build for CUDA"):
        resolve_device("cuda:0")


def test_no_gpu_in_sight(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match="sees no GPU; look at nvidia-smi and at CUDA_VISIBLE_DEVICES"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            UnsupportedGpuError("Tesla T4 has compute capability 7.5; the kernels need 8.0 (Ampere) or newer"),
            r"device 'cuda' cannot be used: Tesla T4 has compute capability 7\.5; the kernels need 8\.0",
        ),
        (
            RuntimeError("CUDA error: no kernel image"),
            "CUDA error: no kernel image; torch .* needs the NVIDIA driver 580",
        ),
    ],
    ids=["capability", "driver"],
)
def test_a_gpu_that_runs_no_kernels(error, message, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "empty", raises(error))
    with pytest.raises(ConfigError, match=message):
        resolve_device("auto")


def test_another_gpu_than_the_first_is_chosen_by_what_the_process_sees(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="set CUDA_VISIBLE_DEVICES=1 and device='cuda'"):
        resolve_device("cuda:1")
