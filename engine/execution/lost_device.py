"""A GPU that computes nothing any more in this process: after an illegal access, an uncorrectable memory error."""

import torch


def is_lost(device: torch.device) -> bool:
    """Whether every call would fail from now on, as CUDA has it after a kernel's fault. Waits for the device."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
