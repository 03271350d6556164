"""A device that is out of memory, or lost to this process: how that shows, and what can be given back."""

import torch

# torch says so with a type of its own where its allocator was asked. On a CPU it raises a bare RuntimeError, and so do
# the driver, cuBLAS and Triton, which take their memory beside that allocator.
_SAID = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")


def is_out_of_memory(error: Exception) -> bool:
    """Whether a step with fewer tokens may do what this one could not."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in _SAID)


def release_cached_memory(device: torch.device) -> None:
    """Give the GPU's driver what torch's allocator keeps for later: others than torch need it, or larger pieces of it.

    Waits for the device. On a CPU there is nothing to give back.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


def is_lost(device: torch.device) -> bool:
    """Whether every call would fail from now on, as CUDA has it after an illegal access or an uncorrectable error.

    Waits for the device.
    """
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False
