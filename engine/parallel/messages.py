"""What rank 0 tells the others, one message a step or a change of the KV cache; and what they tell it."""

import signal
from collections.abc import Sequence
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from ..checkpoints.model_config import ModelConfig
from ..config import EngineConfig
from ..lora.adapter import Adapter
from ..vision.encoder import ImageTokens

Ints = NDArray[numpy.int64]

# Has a rank write what its threads are at to standard error, whatever holds them.
SHOW = signal.SIGUSR1


class Task(NamedTuple):
    """The first thing a rank is told: its number among all, which model they share, and where they find each other."""

    rank: int
    model_config: ModelConfig
    config: EngineConfig
    rendezvous: str


class Loaded(NamedTuple):
    """A rank has read its weights."""


class Failed(NamedTuple):
    """A rank can go on no more. `is_config`: for a reason that a user can mend."""

    message: str
    is_config: bool = False


class Begin(NamedTuple):
    """All have read their weights."""


class LastRows(NamedTuple):
    """The rows that the last layer computes, as `LastTokens` has them."""

    rows: Ints
    query_lens: Sequence[int]
    sampled: Ints


class WholeStep(NamedTuple):
    """A batch's layout. Its numbers have 32 bits each, as bytes: they are packed and unpacked in no time.

    places: slots, then positions. tables: the block tables one after the other; num_blocks: of each sequence.
    num_wanted: how many tokens' logits are wanted; None: of all. Which they are comes with the token ids, on the
    device. prompt_chunks: the tokens whose logits prompts want, as many at a time as rank 0 looks at. `decodes`: each
    sequence decodes a token, and the next step may be a `NextStep`. adapters: as `Batch` has them, or empty. states:
    the slots that the sequences read, then those that they write, or empty. images: as `Batch` has them.
    """

    places: bytes
    query_lens: bytes
    context_lens: bytes
    tables: bytes
    num_blocks: bytes
    num_wanted: int | None
    last_rows: LastRows | None
    prompt_chunks: Sequence[Ints]
    decodes: bool
    adapters: bytes
    states: bytes
    images: ImageTokens | None


class NextStep(NamedTuple):
    """The same sequences decode one more token each; begun: rows, then the blocks that these begin, 32 bits each."""

    begun: bytes


class CopyBlocks(NamedTuple):
    pairs: Sequence[tuple[int, int]]


class ZeroBlocks(NamedTuple):
    blocks: Sequence[int]


class SwapOut(NamedTuple):
    """Keep the blocks' content under this number."""

    number: int
    blocks: Sequence[int]


class SwapIn(NamedTuple):
    """Put what is kept under this number, from its `first` block on, into these blocks."""

    number: int
    first: int
    blocks: Sequence[int]


class ForgetSwapped(NamedTuple):
    numbers: Sequence[int]


class HoldAdapters(NamedTuple):
    """Have the adapters of these numbers ready, of which these are new, with a process's own part of each."""

    numbers: Sequence[int]
    new: Sequence[Adapter]


Order = WholeStep | NextStep | CopyBlocks | ZeroBlocks | SwapOut | SwapIn | ForgetSwapped | HoldAdapters
