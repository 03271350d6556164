"""Numbers from the host into device memory that stays."""

from torch import Tensor


def upload(source: Tensor, target: Tensor) -> None:
    """Copy from the host without waiting for the device; `source` may be changed as soon as this returns."""
    if target.is_cuda:
        # The allocator of pinned memory knows of the copy, and does not reuse this before it is done.
        source = source.pin_memory()
    target.copy_(source, non_blocking=True)
