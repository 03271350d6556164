"""How far a kernel may be from its reference, by dtype; the only such table."""

import torch
from torch import Tensor

TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2}
DTYPES = list(TOLERANCES)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Same shape, dtype and, within the dtype's tolerance (absolute and relative), numbers."""
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
