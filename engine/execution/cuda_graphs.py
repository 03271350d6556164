"""Short steps as CUDA graphs: what the forward pass launches, captured once, and launched whole for each step.

A graph launches the same kernels on the same addresses each time. So a step's tokens are copied to where it reads
them, and padded to its size with tokens that nothing is kept of and that no attention is computed for; and attention
does whatever the work list in device memory says, so that one graph serves any mix of decodes, shared prefixes and
prefills. Steps of more tokens than the largest size are computed eagerly, and of a model with recurrent states
those in which somebody has more than one token.

Graphs are captured when they are first wanted, but for the largest. A job uses few of them, each takes the device's
memory (tens of MiB for a model of 32 layers), and a capture takes no longer than two eager steps.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy
import torch
from torch import Tensor

from ...kernels.kv_cache import PADDING_SLOT
from ...kernels.lora import TokenTiles
from ...kernels.paged_attention import LAUNCHES, AttentionMetadata, PlanKey, PlanTooLargeError, StaticPlans
from ...kernels.recurrent_states import StateSlots
from ..checkpoints.model_config import ModelConfig
from ..config import EngineConfig
from ..errors import message_of
from ..kv_cache.state_pool import NULL_STATE
from ..lora.slots import AdapterSlots
from .batch import Batch
from .devices import flops_per_second
from .graph_sizes import graph_sizes, max_graphs

logger = logging.getLogger(__name__)

# The model's forward pass: token ids, positions, slots, attention's metadata and, of a model with recurrent states,
# where these are, to [num_tokens, hidden_size].
Forward = Callable[[Tensor, Tensor, Tensor, AttentionMetadata, StateSlots | None], Tensor]
Replay = Callable[[], None]
# Runs a function, then records what it launches. Raises `RuntimeError` where that cannot be captured.
Capture = Callable[[Callable[[], None]], Replay]


class CaptureError(RuntimeError):
    """The model's forward pass is not one that graphs are made of."""


@dataclass(frozen=True)
class GraphLimits:
    """sizes: how many tokens the graphs are for, ascending. blocks_per_sequence: the longest block table.

    max_num_seqs: how many sequences may decode in a step. max_graphs: how many graphs are held at a time.
    """

    sizes: Sequence[int]
    blocks_per_sequence: int
    block_size: int
    max_num_seqs: int
    max_graphs: int

    @classmethod
    def of(cls, config: EngineConfig, model: ModelConfig, device: torch.device) -> Self:
        longest = config.longest_sequence(model.max_position_embeddings)
        sizes = graph_sizes(config, model, flops_per_second(device))
        num_blocks, num_graphs = -(-longest // config.block_size), max_graphs(config, len(sizes))
        return cls(sizes, num_blocks, config.block_size, config.max_num_seqs, num_graphs)

    @property
    def tiers(self) -> list[int]:
        """The sizes up to each of which graphs have their inputs in one place, ascending.

        Of the room for larger steps some is copied with each step: those in which all decode, the most, have less.
        """
        of_decodes = min(bisect_left(self.sizes, self.max_num_seqs), len(self.sizes) - 1)
        return sorted({self.sizes[of_decodes], self.sizes[-1]})


class CudaCapture:
    """Captures with torch. The graphs share their memory: no two of them may run at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None]) -> Replay:
        current = torch.cuda.current_stream(self._stream.device)
        # Around torch's own context, which does not leave its stream when a capture fails.
        with torch.cuda.stream(current):
            # What is done once, compiling and allocating workspaces, is not to happen in a capture.
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    function()
            finally:
                # What was launched writes into the KV cache, also where the rest of it did not fit into the memory.
                current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # The worker's other threads may do as they like meanwhile.
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    function()
            except BaseException:
                self._give_up(graph)
                raise
        return graph.replay

    def _give_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """Tell torch's allocator that a capture is over; else it refuses to give any memory back from then on.

        torch itself does so only where the driver has ended the capture without an error.
        """
        with suppress(RuntimeError):
            graph.pool()
            return
        # Before 2.8 torch has another name for it.
        old_name = "_cuda_endAllocateCurrentStreamToPool"
        end_allocating = getattr(torch._C, "_cuda_endAllocateToPool", None) or getattr(torch._C, old_name)
        # Each for itself: torch refuses to end what it has ended already.
        for end in (end_allocating, torch._C._cuda_releasePool):
            with suppress(RuntimeError):
                end(self._stream.device_index, self._pool)


class _Inputs:
    """What graphs of up to `num_tokens` tokens read of a step: attention's plans, each token's slot and position."""

    def __init__(self, keys: list[PlanKey], num_tokens: int, limits: GraphLimits, device: torch.device) -> None:
        self.num_tokens = num_tokens
        self.plans = StaticPlans(
            keys,
            num_tokens,
            limits.blocks_per_sequence,
            limits.block_size,
            device,
            num_places=2 * _stride(num_tokens),
        )
        # Slots, then positions; where those begin depends on the graph.
        self.places = self.plans.places
        self.places[:num_tokens].fill_(PADDING_SLOT)


class _States:
    """Where a graph of `size` decodes finds its sequences' recurrent states: nowhere, until a step's are loaded."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._size = size
        self.slots = StateSlots([1] * size, [NULL_STATE] * size, [NULL_STATE] * size, device)
        self._none = self._loaded = StateSlots([], [], [], device)
        self._put(self._none)

    def load(self, slots: StateSlots) -> None:
        # As long as the same sequences decode, theirs are where they were.
        if slots is not self._loaded:
            self._put(slots)

    def clear(self) -> None:
        """Until the next step is loaded, nobody has a state: what is computed changes none."""
        self.load(self._none)

    def _put(self, slots: StateSlots) -> None:
        # Padding has no tokens, and so neither reads nor writes a state.
        padding = [0] * (self._size - len(slots.query_lens))
        self.slots.table.load(*([*column, *padding] for column in (slots.query_lens, slots.read, slots.write)))
        self._loaded = slots


class CudaGraphs:
    """Computes steps: with a graph where they are small enough, else, and after a capture has failed, eagerly."""

    def __init__(
        self,
        forward: Forward,
        limits: GraphLimits,
        device: torch.device,
        capture: Capture,
        adapters: AdapterSlots | None = None,
        has_states: bool = False,
    ) -> None:
        """Captures the largest graph: the others find their memory in what it has allocated.

        `adapters`: what steps are computed with whose tokens have LoRA adapters; they have graphs of their own.
        `has_states`: whether the model has recurrent states.

        Raises `CaptureError` where attention has no plans that a graph could read.
        """
        self._forward = forward
        self._capture = capture
        self._sizes = list(limits.sizes)
        self._max_graphs = limits.max_graphs
        # Those that were made again included.
        self.num_captures = 0
        largest = self._sizes[-1]
        self._token_ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._replays: dict[tuple[int, frozenset[str], bool], Replay] = {}
        self._adapters = adapters
        # By the graphs' sizes.
        self._tiles: dict[int, TokenTiles] = {}
        self._has_states = has_states
        self._states: dict[int, _States] = {}

        # One padding token says which plans the layers ask for.
        trial = AttentionMetadata([1], [1], [[0]], limits.block_size, device)
        padding = torch.full((1,), PADDING_SLOT, dtype=torch.int64, device=device)
        hidden = forward(self._token_ids[:1], self._token_ids[:1], padding, trial, self._state_slots(1))
        if not trial.device_plans:
            raise CaptureError("attention does not run as a Triton kernel here")
        self._inputs = [_Inputs(list(trial.device_plans), tier, limits, device) for tier in limits.tiers]
        self._hidden = hidden.new_zeros(largest, hidden.shape[1])
        self._slices: dict[int, tuple[Tensor, Tensor]] = {}
        self._find_or_capture(largest, frozenset(LAUNCHES), is_adapted=False)

    def forward(self, batch: Batch) -> Tensor:
        """The forward pass of a batch: [num_tokens, hidden_size], to be read before the next call writes over it."""
        num_tokens = len(batch.token_ids)
        place = bisect_left(self._sizes, num_tokens)
        if place == len(self._sizes) or (batch.states is not None and num_tokens > len(batch.states.query_lens)):
            return self._compute_eagerly(batch)
        size = self._sizes[place]
        try:
            launches = self._load(batch, size)
        except PlanTooLargeError:
            return self._compute_eagerly(batch)
        replay = self._find_or_capture(size, launches, batch.adapters is not None)
        if replay is None:
            return self._compute_eagerly(batch)
        if batch.states is not None:
            self._states_of(size).load(batch.states)
        replay()
        return self._of_tokens(num_tokens)[1]

    def _compute_eagerly(self, batch: Batch) -> Tensor:
        tiles = None
        if batch.adapters is not None and self._adapters is not None:
            tiles = self._adapters.tiles_of(batch.adapters)
        with self._adapted(tiles):
            return self._forward(batch.token_ids, batch.positions, batch.slots, batch.attention, batch.states)

    def _adapted(self, tiles: TokenTiles | None) -> AbstractContextManager[None]:
        return nullcontext() if tiles is None or self._adapters is None else self._adapters.applied(tiles)

    def _load(self, batch: Batch, size: int) -> frozenset[str]:
        """Put the batch where a graph of this size reads it; returns what attention has to launch.

        Padding keeps the token ids of an earlier step, which are as good as any.
        """
        num_tokens, places = len(batch.token_ids), batch.places
        if num_tokens < (stride := _stride(size)):
            places = numpy.zeros((2, stride), dtype=numpy.int64)
            places[:, :num_tokens] = batch.places
            places[0, num_tokens:] = PADDING_SLOT
        launches = self._inputs_of(size).plans.load(batch.attention, places.ravel())
        self._of_tokens(num_tokens)[0].copy_(batch.token_ids, non_blocking=True)
        if batch.adapters is not None and self._adapters is not None:
            if size not in self._tiles:
                self._tiles[size] = self._adapters.blank(size)
            self._adapters.load(self._tiles[size], batch.adapters)
        return launches

    def _state_slots(self, size: int) -> StateSlots | None:
        return self._states_of(size).slots if self._has_states else None

    def _states_of(self, size: int) -> _States:
        if size not in self._states:
            self._states[size] = _States(size, self._token_ids.device)
        return self._states[size]

    def _inputs_of(self, size: int) -> _Inputs:
        return next(each for each in self._inputs if size <= each.num_tokens)

    def _of_tokens(self, number: int) -> tuple[Tensor, Tensor]:
        """What of the token ids and the output so many tokens are: made once, as torch takes its time to slice."""
        if number not in self._slices:
            self._slices[number] = self._token_ids[:number], self._hidden[:number]
        return self._slices[number]

    def _find_or_capture(self, size: int, launches: frozenset[str], is_adapted: bool) -> Replay | None:
        """None when a capture has failed: there are no graphs from then on, and their memory is free."""
        key = (size, launches, is_adapted)
        replay = self._replays.pop(key, None)
        if replay is None:
            try:
                metadata = self._inputs_of(size).plans.metadata(size, launches)
                tiles = self._tiles[size] if is_adapted else None
                if self._has_states:
                    # Before its capture all is computed once, and states are not to be changed twice.
                    self._states_of(size).clear()
                replay = self._capture(partial(self._compute, size, metadata, tiles))
                self.num_captures += 1
            except RuntimeError as error:
                logger.warning("CUDA graphs are off, from now on steps run eagerly: %s", message_of(error))
                self._sizes.clear()
                self._replays.clear()
                return None
        self._replays[key] = replay
        # The one that was not used for the longest time makes place for another.
        if len(self._replays) > self._max_graphs:
            del self._replays[next(iter(self._replays))]
        return replay

    def _compute(self, size: int, metadata: AttentionMetadata, tiles: TokenTiles | None) -> None:
        """The forward pass of what is loaded, from memory that stays into memory that stays."""
        num_plans = len(metadata.device_plans)
        places, stride = self._inputs_of(size).places, _stride(size)
        positions = places[stride : stride + size]
        token_ids, slots = self._token_ids[:size], places[:size]
        with self._adapted(tiles):
            hidden = self._forward(token_ids, positions, slots, metadata, self._state_slots(size))
        assert len(metadata.device_plans) == num_plans, "a layer made a plan that no step would replace"
        self._hidden[:size].copy_(hidden)


def _stride(size: int) -> int:
    """From a graph's slots to its positions: so far that both begin at a multiple of 16 bytes, as kernels like it."""
    return size + size % 2
