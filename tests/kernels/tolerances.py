"""How far a kernel may be from its reference, by dtype; the only such table."""

import torch
from torch import Tensor

TOLERANCES = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# Those that a CPU computes in.
DTYPES = [torch.float32, torch.bfloat16]


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Same shape, dtype and, within the dtype's tolerance (absolute and relative), numbers."""
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
