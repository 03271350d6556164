"""The compiled kernels of Mamba-2 against the reference, on each instruction set that this processor has."""

from functools import partial

import pytest
import torch

from headrace.kernels.mamba2 import grouped_gated_rms_norm
from headrace.kernels.mamba2.native import grouped_gated_rms_norm_native, takes_native_norm
from headrace.kernels.mamba2.reference import grouped_gated_rms_norm_reference
from headrace.kernels.native import runs_native

from .native_cases import native_kernels, of_every_way
from .tolerances import DTYPES, assert_close

pytestmark = native_kernels


@of_every_way
@pytest.mark.parametrize("shape", [(1, 1, 16), (3, 2, 48), (0, 2, 16), (7, 8, 128), (2, 1, 528)], ids=str)
def test_norm(shape, instructions, dtype):
    """Tokens, groups and their size."""
    num_tokens, num_groups, group_size = shape
    size = num_groups * group_size
    x, weight = (torch.randn(num_tokens, size) * 3).to(dtype), torch.randn(size).to(dtype)
    gate = torch.randn(num_tokens, size + 5).to(dtype)[:, 2:-3]
    output = grouped_gated_rms_norm_native(x, gate, weight, 1e-6, num_groups, instructions)
    assert_close(output, grouped_gated_rms_norm_reference(x, gate, weight, 1e-6, num_groups))


@of_every_way
def test_norm_with_several_threads(instructions, dtype, request):
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    x, gate, weight = (torch.randn(shape).to(dtype) for shape in ((401, 96), (401, 96), (96,)))
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(grouped_gated_rms_norm_native(x, gate, weight, 1e-6, 2, instructions))
    assert torch.equal(*results)


def test_norm_takes_the_compiled_kernel_where_there_is_one():
    for size, num_groups, is_taken in ((32, 2, True), (48, 2, False), (20, 1, False)):
        for dtype in DTYPES:
            x, gate, weight = (torch.randn(shape).to(dtype) for shape in ((3, size), (3, size), (size,)))
            assert takes_native_norm(x, gate, weight, num_groups) == (is_taken and runs_native(x))
            given = x, gate, weight, 1e-6, num_groups
            assert_close(grouped_gated_rms_norm(*given), grouped_gated_rms_norm_reference(*given))
