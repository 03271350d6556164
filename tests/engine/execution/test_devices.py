"""Devices that cannot be used, and what is said of them. No GPU is at hand, so what torch would say of one is set."""

import logging
import shutil
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.checkpoints.quantization_config import read_quantization
from headrace.engine.errors import ConfigError
from headrace.engine.execution import devices, gpu_checks
from headrace.engine.execution.devices import resolve_device
from headrace.engine.execution.gpu_checks import require_attention, warn_of_widened_weights
from headrace.kernels.device import UnsupportedGpuError
from headrace.kernels.paged_attention import attention_shape

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


@pytest.fixture
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An L4 that kernels run on, and all that is installed for it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L4")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_86", "sm_90"])
    monkeypatch.setattr(torch, "empty", lambda *sizes, device: None)
    for module in (devices, gpu_checks):
        monkeypatch.setattr(module, "runs_triton", lambda tensor: True)
    monkeypatch.setattr(gpu_checks, "supports_fp8", lambda device: True)
    monkeypatch.setenv("CC", sys.executable)


@pytest.mark.usefixtures("_gpu")
def test_a_gpu_that_is_one():
    assert resolve_device("auto") == torch.device("cuda")


@pytest.mark.usefixtures("_gpu")
def test_one_that_does_not_exist():
    with pytest.raises(ConfigError, match=r"device 'cuda:1' does not exist: this process sees 1 GPU\(s\)"):
        resolve_device("cuda:1")


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(
    ("capability", "built_for", "is_one"),
    [
        ((8, 9), ["sm_80"], True),
        ((8, 0), ["sm_86"], False),
        ((12, 0), ["sm_80", "sm_90a"], False),
        ((12, 0), ["sm_80", "compute_90"], True),
        ((12, 1), ["sm_90", "sm_120f"], True),
    ],
)
def test_a_torch_without_code_for_the_gpu(capability, built_for, is_one, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built_for)
    if is_one:
        assert resolve_device("cuda") == torch.device("cuda")
    else:
        with pytest.raises(
            ConfigError, match=r"NVIDIA L4 has compute capability .* is built for sm_.*: install a build"
        ):
            resolve_device("cuda")


@pytest.mark.usefixtures("_gpu")
def test_amds_gpus(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    with pytest.raises(ConfigError, match=r"built for AMD's GPUs, .* install a build for CUDA, or set device=cpu"):
        resolve_device("auto")


@pytest.mark.usefixtures("_gpu")
def test_no_compiler(monkeypatch):
    monkeypatch.delenv("CC")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="Triton needs a C compiler, and there is neither gcc nor clang: install"):
        resolve_device("cuda")
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "clang" else None)
    assert resolve_device("cuda") == torch.device("cuda")
    monkeypatch.setenv("CC", "gcc-99")
    with pytest.raises(ConfigError, match="Triton needs a C compiler, and CC='gcc-99' names none: unset it"):
        resolve_device("cuda")


@pytest.mark.usefixtures("_gpu")
def test_no_headers_of_pythons(monkeypatch, tmp_path):
    """As on a Debian without `python3-dev`."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
    with pytest.raises(ConfigError, match=rf"Triton compiles against Python's headers, and there is no {tmp_path}/Pyt"):
        resolve_device("cuda")
    (tmp_path / "Python.h").touch()
    assert resolve_device("cuda") == torch.device("cuda")


@pytest.mark.usefixtures("_gpu")
@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"head_dim": 528}, "has heads of 528, and the GPU's kernels take 16 to 512: set device=cpu"),
        ({"num_attention_heads": 71}, "float32 with heads of 256 needs 202 KiB .* has 99 KiB .* set dtype=bfloat16"),
    ],
)
def test_a_model_whose_attention_finds_no_room(sizes, message, monkeypatch, chat_folder):
    monkeypatch.setattr(attention_shape, "shared_bytes", lambda device: 99 * 1024)
    model = replace(ModelConfig.from_pretrained(chat_folder), num_key_value_heads=1, head_dim=256)
    gpu = torch.device("cuda")
    require_attention(replace(model, num_attention_heads=8), torch.float32, gpu)
    with pytest.raises(ConfigError, match=message):
        require_attention(replace(model, **sizes), torch.float32, gpu)
    require_attention(replace(model, **sizes), torch.float32, torch.device("cpu"))


@pytest.mark.usefixtures("_gpu")
def test_fp8_weights_where_nothing_multiplies_them(monkeypatch, caplog):
    fp8 = read_quantization({"quantization_config": {"quant_method": "fp8"}})
    gpu = torch.device("cuda")
    warn_of_widened_weights(fp8, torch.bfloat16, gpu)
    assert not caplog.messages
    monkeypatch.setattr(gpu_checks, "supports_fp8", lambda device: False)
    warn_of_widened_weights(None, torch.bfloat16, gpu)
    warn_of_widened_weights(fp8, torch.bfloat16, gpu)
    assert [message.partition(",")[0] for message in caplog.messages] == [
        "the checkpoint's FP8 weights become bfloat16"
    ]


def test_another_gpu_than_the_first_is_chosen_by_what_the_process_sees(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="set CUDA_VISIBLE_DEVICES=1 and device='cuda'"):
        resolve_device("cuda:1")
