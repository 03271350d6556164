"""LoRA adapters of a model that several processes share: rank 0 reads them, and each holds its own part of them all."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..checkpoints.model_config import ModelConfig
from ..lora.adapter import Adapter, LowRank
from ..lora.installed import InstalledAdapters
from ..models.blocks import LinearPart
from ..sharding.ranks import Ranks, place_of
from ..sharding.shard import Part, Shard
from ..sharding.stages import stage_layers
from .messages import HoldAdapters


class OwnAdapters:
    """A process's parts of the adapters that are held; all do the same at the same time."""

    def __init__(self, installed: InstalledAdapters, ranks: Ranks) -> None:
        self._installed = installed
        self._ranks = ranks
        # By their numbers.
        self.known: dict[int, Adapter] = {}

    def hold(self, numbers: Sequence[int], new: Iterable[Adapter]) -> None:
        """Have those of these numbers ready, which are new or known; the others are forgotten.

        Raises `OutOfMemoryError` in all processes where one of them has no memory for it: then all stay known, so that
        those before can be held again.
        """
        self.known.update((adapter.number, adapter) for adapter in new)
        held = {number: self.known[number] for number in numbers}
        if not self._ranks.least(self._has_room_for(list(held.values()))):
            raise torch.OutOfMemoryError("a process that shares the model has no memory for its part")
        self.known = held

    def _has_room_for(self, held: Sequence[Adapter]) -> bool:
        try:
            self._installed.install(held)
        except torch.OutOfMemoryError:
            return False
        return True


class AdapterShares:
    """What each process, the first of them this one, has of an adapter.

    Sharing takes the adapter's matrices apart: it has none any more. `parts`: the whole model's projections.
    `tell_each` sends the other ones an order each.
    """

    def __init__(
        self,
        own: OwnAdapters,
        model: ModelConfig,
        parts: Mapping[str, LinearPart],
        sizes: tuple[int, int],
        tell_each: Callable[[Iterable[HoldAdapters]], None],
    ) -> None:
        """sizes: how many ranks share a stage, and how many stages there are."""
        self._own = own
        self._model = model
        self._parts = parts
        self._size, self._num_stages = sizes
        self._tell_each = tell_each

    def install(self, held: Sequence[Adapter]) -> None:
        """Have these, and those alone, ready in all processes. Raises `OutOfMemoryError`."""
        numbers = [adapter.number for adapter in held]
        new = [adapter for adapter in held if adapter.number not in self._own.known]
        num_others = self._size * self._num_stages - 1
        self._tell_each(
            HoldAdapters(numbers, [self._share(adapter, process) for adapter in new])
            for process in range(1, num_others + 1)
        )
        own = [self._share(adapter, 0) for adapter in new]
        for adapter in new:
            adapter.additions = {}
        self._own.hold(numbers, own)

    def _share(self, adapter: Adapter, process: int) -> Adapter:
        stage, rank = place_of(process, self._size, self._num_stages)
        start, end = stage_layers(self._model.num_hidden_layers, stage, self._num_stages)
        shard = Shard(rank, self._size, self._model) if self._size > 1 else None
        additions = {
            name: addition if shard is None else _cut(addition, shard.part(name), self._parts[name].order)
            for name, addition in adapter.additions.items()
            if start <= layer_of(name) < end
        }
        return replace(adapter, additions=additions, num_requests=0)


def layer_of(name: str) -> int:
    """Of a projection that can be adapted, named as checkpoints do: model.layers.0.self_attn.q_proj."""
    return int(name.partition(".layers.")[2].partition(".")[0])


def _cut(addition: LowRank, part: Part | None, order: Tensor | None) -> LowRank:
    """As its projection is: by its outputs, or by its inputs, whose products the ranks sum up.

    order: where the checkpoint has each output of the whole, if in an order of its own. That of a part is the same.
    """
    if part is None:
        return addition
    places = torch.cat([torch.arange(start, end) for start, end in part.ranges])
    if not part.by_outputs:
        return LowRank(_columns(addition.down, places), addition.up)
    if order is not None:
        places = torch.isin(order, places).nonzero().flatten()
    return LowRank(addition.down, _columns(addition.up, places))


def _columns(matrix: Tensor, places: Tensor) -> Tensor:
    # Copies: a part of a tensor would be sent with the rest of its memory.
    return matrix[:, places].contiguous()
