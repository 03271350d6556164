"""What of a GPU, and of what is installed for it, the kernels need; what is said where it is not there."""

import logging
import os
import shutil
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch

from ...kernels.device import UnsupportedGpuError, runs_triton, supports_fp8
from ...kernels.paged_attention import AttentionShape
from ..checkpoints.model_config import ModelConfig
from ..checkpoints.quantization_schemes import ByteScheme, QuantizationConfig
from ..errors import ConfigError

logger = logging.getLogger(__name__)

_COMPILERS = ("gcc", "clang")


def require_installation(device: torch.device) -> None:
    """Raises `ConfigError` unless torch has code for the GPU, and Triton a compiler for its launchers."""
    if torch.version.hip is not None:
        raise ConfigError(
            f"torch {torch.__version__} is built for AMD's GPUs, and the kernels are for NVIDIA's: install a build for "
            "CUDA, or set device=cpu"
        )
    capability, built_for = torch.cuda.get_device_capability(device), torch.cuda.get_arch_list()
    if built_for and not _has_code(capability, built_for):
        raise ConfigError(
            f"device {str(device)!r} cannot be used: {_described(device)}, and torch {torch.__version__} is built for "
            f"{', '.join(built_for)}: install a build for a newer CUDA"
        )
    if runs_triton(torch.empty(0, device=device)) and (missing := _missing_for_triton()) is not None:
        raise ConfigError(f"device {str(device)!r} cannot be used: {missing}")


def require_attention(model: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
    """Raises `ConfigError` where attention's kernel does not take the model's heads, or has not enough memory there."""
    if device.type != "cuda" or not runs_triton(torch.empty(0, device=device)):
        return
    try:
        for first, *_ in model.kv_groups.values():
            layer = model.of_layer(first)
            AttentionShape.of(
                layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim, layer.value_dim, dtype, device
            ).kernels(device)
    except ValueError as error:
        raise ConfigError(f"{model.path} has {error}: set device=cpu") from error
    except UnsupportedGpuError as error:
        raise ConfigError(f"{model.path} cannot be computed here: {error}") from error


def warn_of_widened_weights(checkpoint: QuantizationConfig | None, dtype: torch.dtype, device: torch.device) -> None:
    """Where a checkpoint's FP8 weights are computed with in more bits, say what that costs and what does not."""
    if checkpoint is None or device.type != "cuda" or supports_fp8(device):
        return
    if any(isinstance(scheme, ByteScheme) and scheme.kind == "fp8" for _, scheme in checkpoint.schemes):
        logger.warning(
            "the checkpoint's FP8 weights become %s, twice their size: %s, and FP8 products need 8.9 (Ada) or newer. "
            "int8 (W8A8) and 4-bit checkpoints (AWQ, GPTQ) stay as small as they are",
            str(dtype).removeprefix("torch."),
            _described(device),
        )


def _described(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}"


def _has_code(capability: tuple[int, int], built_for: Sequence[str]) -> bool:
    """Code runs on its own generation from its own version on; what the driver compiles, on all that are newer."""
    for kind, version in (each.split("_", 1) for each in built_for):
        major, minor = divmod(int(version.rstrip("af")), 10)
        if (major, minor) <= capability and (kind == "compute" or major == capability[0]):
            return True
    return False


def _missing_for_triton() -> str | None:
    """What Triton's launchers cannot be compiled without, and what to do."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return None
    compiler = os.environ.get("CC")
    if compiler is not None and shutil.which(compiler) is None:
        return f"Triton needs a C compiler, and CC={compiler!r} names none: unset it, or set it to one"
    if compiler is None and not any(shutil.which(name) for name in _COMPILERS):
        return (
            "Triton needs a C compiler, and there is neither gcc nor clang: install one with its headers (Debian: "
            "apt-get install gcc libc6-dev), or set CC to it"
        )
    if not (header := _python_header()).exists():
        return (
            f"Triton compiles against Python's headers, and there is no {header}: install them (Debian: apt-get "
            "install python3-dev)"
        )
    return None


def _python_header() -> Path:
    """Where Triton looks for it."""
    scheme = sysconfig.get_default_scheme()
    # Debian's own, for what pip installs: its headers are elsewhere.
    return Path(sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]) / "Python.h"
