"""The KV cache of all ranks: what is done with the blocks of the first is done with those of the others."""

from collections.abc import Callable, Sequence
from itertools import count
from weakref import finalize

from torch import Tensor

from ..kv_cache.kv_memory import KVMemory
from .interrupts import interrupts_held
from .messages import CopyBlocks, ForgetSwapped, Order, SwapIn, SwapOut, ZeroBlocks


class SwappedShares:
    """Blocks in the host's memory: this rank's share, and the number that the others keep theirs by."""

    def __init__(self, number: int, share: list[Tensor]) -> None:
        self.number = number
        self.share = share


class MirroredMemory(KVMemory):
    """Takes over what `memory` holds; `tell` sends an order to all other ranks.

    Ctrl-C waits until all have done what one has.
    """

    def __init__(self, memory: KVMemory, tell: Callable[[Order], None]) -> None:
        self.num_blocks, self.block_bytes = memory.num_blocks, memory.block_bytes
        self.caches, self.device = memory.caches, memory.device
        self._tell = tell
        self._numbers = count()
        # Contents that nobody holds any more, which the others still keep.
        self._dropped: list[int] = []

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        with interrupts_held():
            self._tell(CopyBlocks(list(pairs)))
            super().copy(pairs)

    def zero(self, blocks: Sequence[int]) -> None:
        with interrupts_held():
            self._tell(ZeroBlocks(list(blocks)))
            super().zero(blocks)

    def swap_out(self, blocks: Sequence[int]) -> SwappedShares:  # type: ignore[override]
        with interrupts_held():
            self._forget_dropped()
            swapped = SwappedShares(next(self._numbers), super().swap_out(blocks))
            self._tell(SwapOut(swapped.number, list(blocks)))
            finalize(swapped, self._dropped.append, swapped.number)
            return swapped

    def swap_in(self, content: SwappedShares, first: int, blocks: Sequence[int]) -> None:  # type: ignore[override]
        with interrupts_held():
            self._tell(SwapIn(content.number, first, list(blocks)))
            super().swap_in(content.share, first, blocks)

    def _forget_dropped(self) -> None:
        # One after the other: a content may be given up meanwhile, in another thread or by the garbage collector.
        dropped = [self._dropped.pop() for _ in range(len(self._dropped))]
        if dropped:
            self._tell(ForgetSwapped(dropped))
