"""The processes that share a model, as each of them sees the others: sums, joins, and what one tells all."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed

# Its own types leave out half of what it has.
_distributed: Any = distributed
# All do the same at the same time.
_PATIENCE = timedelta(minutes=10)
# How long NCCL's watchdog, which looks at the rendezvous every second, may wait for it once it is deleted.
_STORE_PATIENCE = timedelta(seconds=1)


class Ranks:
    """One process that has the whole model; see `ProcessRanks`."""

    rank = 0
    size = 1

    def meet(self) -> None:
        """Wait until all have come so far. Raises `EngineError` with what another one failed by."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' x, the same on each; may change x."""
        return x

    def join_columns(self, x: Tensor, widths: list[int]) -> Tensor:
        """On rank 0 all ranks' columns side by side: [n, sum(widths)]. x: [n, the rank's own of `widths`]."""
        return x

    def hear(self, x: Tensor) -> Tensor:
        """Rank 0's x, which has the same shape everywhere; changes x on the others."""
        return x

    def least(self, number: int) -> int:
        """The smallest of all ranks' numbers."""
        return number


ALONE = Ranks()


class ProcessRanks(Ranks):
    """Rank `rank` of `size`, each a process with a device of its own: NCCL between GPUs, gloo between CPUs.

    They compute together once they have met. `rendezvous`: a file that none has written to yet, and that nobody waits
    for after that. `all_loaded`: waits until every rank has called it. On a GPU the host waits for no sum and no join.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, rendezvous: str, all_loaded: Callable[[], object]
    ) -> None:
        self.rank, self.size = rank, size
        self._device = device
        self._rendezvous = rendezvous
        self._all_loaded = all_loaded
        self._group: Any = None

    def meet(self) -> None:
        self._all_loaded()
        store = _distributed.FileStore(self._rendezvous, self.size)
        # Not torch's default group, of which a process has one: its user may have made it.
        self._group = _new_group(store, self.rank, self.size, self._device)
        # NCCL connects them when they first compute together.
        self.least(self.rank)
        store.set_timeout(_STORE_PATIENCE)

    def sum(self, x: Tensor) -> Tensor:
        if x.numel():
            self._group.allreduce([x]).wait()
        return x

    def join_columns(self, x: Tensor, widths: list[int]) -> Tensor:
        if not len(x):
            return x.new_empty(0, sum(widths))
        # Of one width: NCCL takes no others.
        padded = x if x.shape[1] == max(widths) else torch.nn.functional.pad(x, (0, max(widths) - x.shape[1]))
        parts = [torch.empty_like(padded) for _ in widths] if self.rank == 0 else []
        options = _distributed.GatherOptions()
        options.rootRank = 0
        self._group.gather([parts] if parts else [], [padded.contiguous()], options).wait()
        return torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1) if parts else x

    def hear(self, x: Tensor) -> Tensor:
        options = _distributed.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([x], options).wait()
        return x

    def least(self, number: int) -> int:
        options = _distributed.AllreduceOptions()
        options.reduceOp = _distributed.ReduceOp.MIN
        found = torch.tensor([number], device=self._device)
        self._group.allreduce([found], options).wait()
        return int(found.item())


def _new_group(store: Any, rank: int, size: int, device: torch.device) -> Any:
    if device.type == "cuda":
        options = _distributed.ProcessGroupNCCL.Options()
        options._timeout = _PATIENCE
        return _distributed.ProcessGroupNCCL(store, rank, size, options)
    gloo_group = _distributed.ProcessGroupGloo
    gloo = gloo_group._Options()
    gloo._timeout = _PATIENCE
    # All are on this host, whatever its name resolves to.
    gloo._devices = [gloo_group.create_device(hostname="127.0.0.1")]
    return gloo_group(store, rank, size, gloo)
