"""Which of the assemblers (ptxas) that come with Triton makes a GPU's machine code of our kernels."""

import ctypes
import os
from typing import Any

import triton

_CHOSEN_BY_USER = "TRITON_PTXAS_PATH"
# The first that was seen to assemble what Hopper's tensor cores multiply as it should.
_FIRST_RIGHT = (12, 9)


def use_newer_assembler(driver: int) -> None:
    """Have kernels for every GPU assembled by what Triton brings for Blackwell, where that is the newer one.

    driver: the newest CUDA of which it loads programs, as its major version. The assembler of CUDA 12.8, which Triton
    3.4 to 3.7 take for Hopper, computes some of the addresses that tensor cores (wgmma) read shared memory at from
    registers which nothing has written: numbers are wrong without a word, or the GPU reports an illegal memory access.
    """
    knobs: Any = getattr(triton, "knobs", None)
    if knobs is None or _CHOSEN_BY_USER in os.environ:
        return
    try:
        usual, other = knobs.nvidia.ptxas, knobs.nvidia.ptxas_blackwell
    except (AttributeError, RuntimeError):
        # An older Triton, or one that was packaged without.
        return
    if _version(usual) < _version(other) and _version(other)[0] <= driver:
        knobs.nvidia.ptxas = other.path


def why_hopper_is_assembled_wrongly() -> str | None:
    """What keeps the kernels for Hopper from being assembled rightly, and what helps; None where nothing does.

    Whoever has named an assembler is taken at their word.
    """
    use_newer_assembler(cuda_of_driver()[0])
    knobs: Any = getattr(triton, "knobs", None)
    if knobs is None or _CHOSEN_BY_USER in os.environ or (version := _version(knobs.nvidia.ptxas)) >= _FIRST_RIGHT:
        return None
    first, found = (".".join(map(str, each)) for each in (_FIRST_RIGHT, version))
    return (
        f"the assembler of CUDA {found} makes wrong machine code of some kernels for Hopper, and the driver loads none "
        "of what the newer one makes that comes with Triton; update the driver to 580 or newer, or set "
        f"{_CHOSEN_BY_USER} to the ptxas of CUDA {first} or newer"
    )


def cuda_of_driver() -> tuple[int, int]:
    """The version of the newest CUDA that the driver knows; (0, 0) without one. No GPU is touched."""
    version = ctypes.c_int(0)
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return 0, 0
    return version.value // 1000, version.value % 1000 // 10


def _version(tool: Any) -> tuple[int, ...]:
    return tuple(map(int, tool.version.split(".")))
