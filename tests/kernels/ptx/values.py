"""The types of PTX as numpy's, and those that numpy has not: bfloat16 and 8-bit floats (PTX ISA, 5.2.3)."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]

UNSIGNED: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED: dict[int, Any] = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
DTYPES: dict[str, Any] = {
    **{f"{letter}{8 * width}": dtype for width, dtype in UNSIGNED.items() for letter in "bu"},
    **{f"s{8 * width}": dtype for width, dtype in SIGNED.items()},
    "f16": np.float16,
    "f32": np.float32,
    "f64": np.float64,
}
# Floats of 16 bits, alone and two in a register.
HALVES = ("f16", "bf16")
PAIRS = ("f16x2", "bf16x2")
FLOATS = ("f32", "f64", *HALVES, *PAIRS)
INTEGERS = tuple(f"{letter}{bits}" for letter in "us" for bits in (16, 32, 64))
BITS = ("b16", "b32", "b64")
_FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
_FP8_NUMBERS = {
    kind: torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy().copy() for kind, dtype in _FP8.items()
}
_FP8_LARGEST = {kind: torch.finfo(dtype).max for kind, dtype in _FP8.items()}
_SMALLEST_NORMAL = np.finfo(np.float32).tiny


def width_of(kind: str) -> int:
    """Bytes of one number."""
    if kind == "bf16":
        return 2
    if kind in _FP8:
        return 1
    return int(np.dtype(DTYPES[kind]).itemsize)


def decoded(bits: Array, kind: str) -> Array:
    """The numbers that unsigned integers of the kind's width stand for: floats of 16 and 8 bits as float32."""
    if kind == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32)
    if kind == "f16":
        return bits.view(np.float16).astype(np.float32)
    if kind in _FP8:
        return _FP8_NUMBERS[kind][bits]
    return bits.view(DTYPES[kind])


def encoded(numbers: Array, kind: str) -> Array:
    """Bits of numbers rounded to the nearest, ties to even; a NaN is PTX's own, and 8 bits have no infinity."""
    if kind == "bf16":
        bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(numbers), 0x7FFF, rounded).astype(np.uint16)
    if kind == "f16":
        halves = numbers.astype(np.float16).view(np.uint16)
        return np.where(np.isnan(numbers), np.uint16(0x7FFF), halves)
    if kind in _FP8:
        largest = _FP8_LARGEST[kind]
        within = np.clip(np.where(np.isnan(numbers), 0, numbers), -largest, largest).astype(np.float32)
        rounded = torch.from_numpy(within).to(_FP8[kind]).view(torch.uint8).numpy()
        return np.where(np.isnan(numbers), np.uint8(0x7F), rounded)
    return np.ascontiguousarray(numbers, DTYPES[kind]).view(UNSIGNED[width_of(kind)])


def parts(bits: Array, width: int) -> Array:
    """Registers cut into numbers of `width` bytes, the lowest first: [threads] to [threads, parts]."""
    return np.ascontiguousarray(bits).view(UNSIGNED[width]).reshape(len(bits), -1)


def joined(pieces: Array) -> Array:
    """The inverse of `parts`."""
    width = pieces.dtype.itemsize * pieces.shape[1]
    return np.ascontiguousarray(pieces).view(UNSIGNED[width]).reshape(len(pieces))


def flushed(numbers: Array) -> Array:
    """`.ftz`: what is subnormal in float32 is zero of the same sign."""
    return np.where(np.abs(numbers) < _SMALLEST_NORMAL, np.copysign(np.float32(0), numbers), numbers)
