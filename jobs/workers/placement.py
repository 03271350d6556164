"""Several workers of one model on a host: which GPUs each of them has, or how many of a CPU's threads."""

import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Self

from ...engine.errors import ConfigError
from ..processes import num_cores

logger = logging.getLogger(__name__)

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_GPUS, _THREADS = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"
_LOOK = """
import torch
print(torch.cuda.device_count() if torch.cuda.is_available() else 0, torch.get_num_threads())
"""
_INSTANCE = "MIG-"


@dataclass(frozen=True)
class Devices:
    """What a worker of this host would find. `gpus`: by what CUDA_VISIBLE_DEVICES may call them, in order.

    `num_threads` are torch's, which may be told to have fewer than there are cores.
    """

    gpus: Sequence[str]
    num_threads: int
    num_cores: int = field(default_factory=num_cores)

    @classmethod
    def found(cls) -> Self:
        """As torch finds them, in a process of its own: no command imports it. Raises `ConfigError`."""
        command = [sys.executable, "-P", "-c", _LOOK]
        looked = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if looked.returncode != 0:
            words = looked.stderr.strip().splitlines() or [f"exit status {looked.returncode}"]
            raise ConfigError(f"torch cannot be asked for the GPUs of this host: {words[-1]}")
        # A library may have something to say before.
        num_gpus, num_threads = map(int, looked.stdout.splitlines()[-1].split())
        return cls(gpu_names(os.environ.get(_GPUS), num_gpus), num_threads)

    def environments(self, num_workers: int, gpus_each: int) -> list[dict[str, str]]:
        """What each worker has in its environment in the place of what is there. Raises `ConfigError`."""
        if not self.gpus:
            if num_workers > (most := max(self.num_cores, self.num_threads)):
                raise ConfigError(
                    f"data_parallel_size={num_workers} is more than the {most} cores that workers would share: "
                    "torch finds no GPU"
                )
            return [{_THREADS: str(max(1, self.num_threads // num_workers))}] * num_workers
        if (needed := num_workers * gpus_each) > len(self.gpus):
            each = f", {gpus_each} for each worker" if gpus_each > 1 else ""
            raise ConfigError(
                f"data_parallel_size={num_workers} needs {needed} GPUs{each}, and there are {len(self.gpus)}"
            )
        starts = range(0, needed, gpus_each)
        return [{_GPUS: ",".join(self.gpus[start : start + gpus_each])} for start in starts]


def gpu_names(visible: str | None, num_found: int) -> list[str]:
    """The names of the GPUs that a process finds. `visible`: CUDA_VISIBLE_DEVICES, None where it is not set."""
    if visible is None:
        return [str(number) for number in range(num_found)]
    names = [name.strip() for name in visible.split(",")]
    if num_found and names[0].startswith(_INSTANCE):
        # Of instances of GPUs a process finds one, however many are named.
        return list(takewhile(lambda name: name.startswith(_INSTANCE), names))
    # A name of no GPU ends the list.
    return names[:num_found]


def place(num_workers: int, gpus_each: int) -> Sequence[Mapping[str, str]]:
    """What each of a host's workers has in its environment in the place of what is there; a single one nothing.

    Raises `ConfigError` where there are too few GPUs, or without any too few cores.
    """
    if num_workers == 1:
        return [{}]
    devices = Devices.found()
    if not devices.gpus and _DRIVER_FILE.exists():
        # Their logs say why.
        logger.warning("there is an NVIDIA driver, but torch finds no GPU: %d workers share the cores", num_workers)
    return devices.environments(num_workers, gpus_each)
