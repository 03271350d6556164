"""The device and the dtypes that an engine computes with, and what is said where there are none such."""

import logging
from contextlib import suppress
from pathlib import Path

import torch

from ...kernels.device import UnsupportedGpuError, num_processors, runs_triton, supports_fp8
from ..errors import ConfigError, message_of
from .gpu_checks import require_installation

logger = logging.getLogger(__name__)

_FP8_DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
# About what a processor reaches in the products of small layers, in 16 bits, by compute capability: a third of its peak
# on data centres' GPUs, more of what others have.
_PROCESSOR_FLOPS = {(8, 0): 1.4e12, (9, 0): 2.25e12, (10, 0): 4e12, (10, 3): 4e12}
_OTHER_PROCESSOR_FLOPS = 8e11
# The oldest Linux driver for each CUDA, from its release notes.
_MIN_DRIVERS = {11: "450.80", 12: "525.60", 13: "580.65"}
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def resolve_device(device: str) -> torch.device:
    """ "auto" is CUDA where there is a GPU, else the CPU.

    Raises `ConfigError`: there is none, or it or its driver is too old for the kernels or for this torch.
    """
    if device == "auto":
        if not torch.cuda.is_available():
            if _DRIVER_FILE.exists():
                logger.warning("there is an NVIDIA driver, but the CPU is used: %s", _why_no_gpu())
            return torch.device("cpu")
        device = "cuda"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {device!r} was asked for, but torch finds no CUDA GPU here: {_why_no_gpu()}")
    found = _named_device(device)
    if found.type == "cuda":
        if found.index:
            if found.index >= (number := torch.cuda.device_count()):
                raise ConfigError(
                    f"device {device!r} does not exist: this process sees {number} GPU(s), from cuda:0 on"
                )
            raise ConfigError(
                f"device {device!r} is not the first GPU that this process sees, where its kernels run: set "
                f"CUDA_VISIBLE_DEVICES={found.index} and device='cuda'"
            )
        _require_usable(found)
    return found


def flops_per_second(device: torch.device) -> float:
    """About how many operations a GPU does in the products of small layers, for estimates."""
    if device.type != "cuda":
        return num_processors(device) * _OTHER_PROCESSOR_FLOPS
    capability = torch.cuda.get_device_capability(device)
    return num_processors(device) * _PROCESSOR_FLOPS.get(capability, _OTHER_PROCESSOR_FLOPS)


def _named_device(name: str) -> torch.device:
    """Raises `ConfigError` for names that torch does not know, and for devices that our kernels do not run on."""
    with suppress(RuntimeError):
        device = torch.device(name)
        if device.type in ("cpu", "cuda"):
            return device
    raise ConfigError(f"device must be auto, cpu or cuda, not {name!r}")


def resolve_dtype(dtype: str, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """ "auto" is the checkpoint's own dtype, or float32 where the CPU has no arithmetic for it."""
    if dtype != "auto":
        return _named_dtype(dtype)
    own = _named_dtype(checkpoint_dtype)
    if device.type == "cpu" and not _cpu_computes(own):
        return torch.float32
    return own


def resolve_kv_cache_dtype(kv_cache_dtype: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """ "auto" is the dtype that the model computes in. Raises `ConfigError` where the device's kernels have no such."""
    if kv_cache_dtype == "auto":
        return dtype
    wanted = _FP8_DTYPES[kv_cache_dtype]
    if device.type != "cuda":
        raise ConfigError(
            f"kv_cache_dtype {kv_cache_dtype} needs a CUDA GPU, and the device is {device.type}: use auto"
        )
    if wanted == torch.float8_e4m3fn and not supports_fp8(device):
        major, minor = torch.cuda.get_device_capability(device)
        raise ConfigError(
            f"kv_cache_dtype {kv_cache_dtype} needs compute capability 8.9 (Ada, Hopper) or newer, and "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}: use fp8_e5m2 or auto"
        )
    return wanted


def _require_usable(device: torch.device) -> None:
    """Raises `ConfigError` unless kernels run there."""
    try:
        runs_triton(torch.empty(0, device=device))
    except UnsupportedGpuError as error:
        raise ConfigError(
            f"device {str(device)!r} cannot be used: {error}: set device=cpu, or CUDA_VISIBLE_DEVICES to a newer GPU"
        ) from error
    except RuntimeError as error:
        raise ConfigError(f"device {str(device)!r} cannot be used: {message_of(error)}; {_needed_driver()}") from error
    require_installation(device)


def _why_no_gpu() -> str:
    """What keeps torch from using one, and what would help."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built for CPUs; install a build for CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return f"{message_of(error)} {_needed_driver()}"
    return "it sees no GPU; look at nvidia-smi and at CUDA_VISIBLE_DEVICES"


def _needed_driver() -> str:
    version = torch.version.cuda or ""
    driver = _MIN_DRIVERS.get(int(version.partition(".")[0] or 0), "one that has it")
    return f"torch {torch.__version__} is for CUDA {version}, which needs the NVIDIA driver {driver} or newer"


def _named_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigError(f"unknown dtype {name!r} in config.json")
    return dtype


def _cpu_computes(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return dtype == torch.float32
