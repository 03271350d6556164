"""How far a kernel may be from its reference, by dtype; the only such table."""

import torch
from torch import Tensor

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# Of products of 8-bit floats near one, of up to 1,200 inputs, on a GPU. Hopper's tensor cores add 32 products at a time
# to the sum with 13 bits below the largest of them, towards zero (arXiv 2412.19437, 3.3.2); computed so, test_scaled's
# products differ from exact ones by as much as was seen on an H200, 0.0018 at most.
FP8_TOLERANCE = 4e-3
# Those that a CPU computes in.
DTYPES = [torch.float32, torch.bfloat16]


def assert_close(actual: Tensor, expected: Tensor, at_least: float = 0.0) -> None:
    """Same shape, dtype and, within the dtype's tolerance (absolute and relative) or this one, numbers."""
    tolerance = max(TOLERANCES[expected.dtype], at_least)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
