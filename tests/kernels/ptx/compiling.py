"""A kernel compiled for arguments as Triton's JIT compiles it for a launch, without a GPU: to PTX and no further."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from .launch import parse
from .program import Program

TYPE_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.bool: "i1",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
# Triton looks for what is a multiple of it.
_MULTIPLE = 16


@dataclass(frozen=True)
class Signature:
    """What a kernel is compiled for, and what it is then launched with."""

    types: dict[str, str]
    constants: dict[tuple[int], Any]
    attributes: dict[tuple[int], list[list[Any]]]
    values: list[Any]

    @property
    def key(self) -> tuple[object, ...]:
        constants = tuple((index, repr(value)) for index, value in self.constants.items())
        return tuple(self.types.items()), constants, tuple(self.attributes)


def signature_of(kernel: Any, arguments: Mapping[str, Any]) -> Signature:
    """As `triton.runtime.jit` specialises: on ones, and on multiples of 16."""
    signature = Signature({}, {}, {}, [])
    for index, parameter in enumerate(kernel.params):
        name, value = parameter.name, arguments[parameter.name]
        is_special = isinstance(value, int) and not parameter.do_not_specialize
        if parameter.is_constexpr or (is_special and value == 1):
            signature.types[name], signature.constants[index,] = "constexpr", value
            continue
        signature.types[name], held = _typed(value)
        signature.values.append(held)
        if (is_special or isinstance(value, Tensor)) and held % _MULTIPLE == 0:
            signature.attributes[index,] = [["tt.divisibility", _MULTIPLE]]
    return signature


def _typed(value: Any) -> tuple[str, Any]:
    if isinstance(value, Tensor):
        return "*" + TYPE_NAMES[value.dtype], np.uint64(value.data_ptr())
    if isinstance(value, float):
        return "fp32", np.float32(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"an argument of a kernel is {value!r}")
    return ("i32", np.int32(value)) if -(2**31) <= value < 2**31 else ("i64", np.int64(value))


def compiled(kernel: Any, signature: Signature, capability: int, options: dict[str, Any]) -> tuple[Program, int]:
    """The program, and how many bytes its CTAs share."""
    source_type = GluonASTSource if kernel.is_gluon() else ASTSource
    source = source_type(kernel, signature.types, signature.constants, signature.attributes)
    triton.knobs.runtime.add_stages_inspection_hook = _leave_out_assembly
    try:
        result = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    finally:
        triton.knobs.runtime.add_stages_inspection_hook = None
    return parse(result.asm["ptx"]), result.metadata.shared


def _leave_out_assembly(*arguments: Any) -> tuple[str, str] | None:
    """Called without arguments for what tells such results from others in Triton's cache."""
    if not arguments:
        return "ptx only", "ptx only"
    _, stages, *_ = arguments
    stages["cubin"] = lambda ptx, metadata: b""
    return None
