"""The processes that share a model, as each of them sees the others: sums, joins, what one tells all or the next."""

from collections import deque
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
# A stage computes on meanwhile.
_MOST_HANDED_ON = 2


class Ranks:
    """One process that has the whole model; see `ProcessRanks`."""

    rank = 0
    size = 1
    stage = 0
    num_stages = 1

    def meet(self) -> None:
        """Wait until all have come so far. Raises `EngineError` with what another one failed by."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum of x over the stage's ranks, the same on each; may change x."""
        return x

    def join_columns(self, x: Tensor, widths: list[int]) -> Tensor:
        """On the stage's rank 0 all columns side by side: [n, sum(widths)]. x: [n, the rank's own of `widths`]."""
        return x

    def hear(self, x: Tensor) -> Tensor:
        """The x of the first of all processes, which has the same shape everywhere; changes x on the others."""
        return x

    def least(self, number: int) -> int:
        """The smallest of all processes' numbers."""
        return number

    def hand_on(self, x: Tensor) -> None:
        """Send x, which stays as it is, to the next stage; may wait until that has taken over what came before."""

    def take_over(self, room: Tensor) -> Tensor:
        """What the stage before hands on, in `room`, which has its shape."""
        return room


ALONE = Ranks()


def place_of(number: int, size: int, num_stages: int) -> tuple[int, int]:
    """The stage of a process, and its rank there: see `ProcessRanks`."""
    return (number // size - 1) % num_stages, number % size


class ProcessRanks(Ranks):
    """Process `number` of several, each with a device of its own: NCCL between GPUs, gloo between CPUs.

    `size` of them, the ranks, share each of `num_stages` stages of layers. Those of the last stage come first, so that
    the process that is told of all requests is the one that has their logits; then those of the first one, and so on.
    They compute together once they have met. `rendezvous`: a file that none has written to yet, and that nobody waits
    for after that. `all_loaded`: waits until every process has called it. On a GPU the host waits for no sum, no join
    and nothing that is handed on.
    """

    def __init__(
        self,
        number: int,
        size: int,
        device: torch.device,
        rendezvous: str,
        all_loaded: Callable[[], object],
        num_stages: int = 1,
    ) -> None:
        self.stage, self.rank = place_of(number, size, num_stages)
        self.size, self.num_stages = size, num_stages
        self._number = number
        self._device = device
        self._rendezvous = rendezvous
        self._all_loaded = all_loaded
        self._world: Any = None
        self._group: Any = None
        # What the next stage may not have taken over yet, oldest first.
        self._handed_on: deque[tuple[Any, Tensor]] = deque()

    def meet(self) -> None:
        self._all_loaded()
        num_processes = self.size * self.num_stages
        store = _distributed.FileStore(self._rendezvous, num_processes)
        # Not torch's default group, of which a process has one: its user may have made it.
        self._world = self._group = _new_group(store, self._number, num_processes, self._device)
        if self.num_stages > 1:
            own_store = _distributed.PrefixStore(f"stage {self.stage}", store)
            self._group = _new_group(own_store, self.rank, self.size, self._device)
        self._connect()
        store.set_timeout(_STORE_PATIENCE)

    def _connect(self) -> None:
        """NCCL connects those that compute together when they first do."""
        self.least(self._number)
        trial = torch.zeros(1, device=self._device)
        self.sum(trial)
        if self.stage > 0:
            self.take_over(trial)
        if self.stage < self.num_stages - 1:
            self.hand_on(trial)
        self.least(self._number)

    def hand_on(self, x: Tensor) -> None:
        while len(self._handed_on) >= _MOST_HANDED_ON:
            self._handed_on.popleft()[0].wait()
        self._handed_on.append((self._world.send([x], self._peer(self.stage + 1), 0), x))

    def take_over(self, room: Tensor) -> Tensor:
        self._world.recv([room], self._peer(self.stage - 1), 0).wait()
        return room

    def _peer(self, stage: int) -> int:
        """The process that has this one's share of another stage."""
        return (stage + 1) % self.num_stages * self.size + self.rank

    def sum(self, x: Tensor) -> Tensor:
        if self.size > 1 and x.numel():
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
        self._world.broadcast([x], options).wait()
        return x

    def least(self, number: int) -> int:
        options = _distributed.AllreduceOptions()
        options.reduceOp = _distributed.ReduceOp.MIN
        found = torch.tensor([number], device=self._device)
        self._world.allreduce([found], options).wait()
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
