"""A few instructions of PTX run over tensors: for the tests of what they do."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from .launch import launch, parse

_KERNEL = """
.visible .entry snippet({parameters})
.reqntid {num_threads}
{{
    .reg .pred %p<8>;
    .reg .b16 %h<16>;
    .reg .b32 %r<128>;
    .reg .f64 %d<8>;
    .reg .b64 %a<8>;
    .reg .b64 %rd<8>;
    mov.u32 %r0, %tid.x;
    mov.u32 %r1, %ctaid.x;
    mad.lo.s32 %r1, %r1, {num_threads}, %r0;
    {rows}
    {body}
    ret;
}}
"""


def emulate(body: str, *tensors: Tensor, num_threads: int = 32, num_ctas: int = 1, shared_bytes: int = 0) -> None:
    """Each thread has its index in `%r0`, and in `%a0`, `%a1` … the address of its row of each tensor."""
    launch(
        parse(program_text(body, tensors, num_threads)),
        [np.uint64(tensor.data_ptr()) for tensor in tensors],
        (num_ctas, 1, 1),
        shared_bytes,
        {f"%a{index}": tensor for index, tensor in enumerate(tensors)},
    )


def program_text(body: str, tensors: Sequence[Tensor], num_threads: int) -> str:
    rows = [
        f"ld.param.b64 %a{index}, [snippet_param_{index}];"
        f"mad.wide.u32 %a{index}, %r1, {tensor.stride(0) * tensor.element_size()}, %a{index};"
        for index, tensor in enumerate(tensors)
    ]
    parameters = ", ".join(f".param .u64 snippet_param_{index}" for index in range(len(tensors)))
    return _KERNEL.format(parameters=parameters, num_threads=num_threads, rows="\n".join(rows), body=body)


def into_shared(num_bytes: int) -> str:
    """Each thread's row of the first tensor goes to its place in shared memory, which so becomes the tensor."""
    copies = "".join(
        f"ld.global.b32 %r3, [%a0+{offset}]; st.shared.b32 [%r2+{offset}], %r3;" for offset in range(0, num_bytes, 4)
    )
    return f"mul.lo.s32 %r2, %r0, {num_bytes}; {copies} bar.sync 0;"
