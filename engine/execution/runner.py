"""What the engine needs of a model."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..kv_cache.swap import PreemptionCosts
from ..lora.adapters import LoraAdapters
from .batch import Batch


class BlockMemory(Protocol):
    """The KV blocks 1 to `num_blocks`, all zero at first, and block 0, which stays so."""

    num_blocks: int
    block_bytes: int

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks, (source, destination); no block is both, or twice a destination."""

    def zero(self, blocks: Sequence[int]) -> None: ...

    def swap_out(self, blocks: Sequence[int]) -> Any:
        """The blocks' content in the host's memory, for `swap_in`."""

    def swap_in(self, content: Any, first: int, blocks: Sequence[int]) -> None:
        """Put what `swap_out` gave, from its `first` block on, into these blocks."""


class OtherProcesses(Protocol):
    """Those that share a model with the engine's."""

    def call_when_dead(self, function: Callable[[str], None]) -> None:
        """Have it called once with what happened to one of them, in any thread; at once where it has already."""

    def show(self) -> None:
        """Have them write what their threads are at to standard error."""

    def close(self) -> None:
        """End them."""


class Runner(Protocol):
    """What the engine needs of a model: logits for a batch, and memory for KV.

    `sliding_window`: how many tokens back the model looks in all its layers, if that is limited. `num_states`: how many
    sequences' states it has room for, 0 where its layers have none. `loras`: where requests may name LoRA adapters.
    `processes`: the others that have a share of the model, if there are any; they tell themselves of a lost device.
    """

    vocab_size: int
    device: torch.device
    sliding_window: int | None
    preemption_costs: PreemptionCosts
    num_states: int
    loras: LoraAdapters | None

    @property
    def memory(self) -> BlockMemory: ...

    @property
    def processes(self) -> OtherProcesses | None: ...

    def execute(self, batch: Batch) -> Tensor:
        """Compute the batch's tokens; returns the logits of its `last_token_index`: [num_sampling, vocab]."""
