"""A prompt's images: what they are, where their tokens stand, and the positions that follow from it. Free of torch."""

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple, Union

import numpy
from numpy.typing import NDArray

from ..checkpoints.vision_config import VisionConfig
from ..errors import InvalidRequestError
from .image_files import Pixels, decode, image_size, require_pillow, scale
from .image_size import Grid, token_grid

if TYPE_CHECKING:
    from PIL.Image import Image

# A file's bytes, or what Pillow has opened.
Picture = Union[bytes, "Image"]


@dataclass(frozen=True, eq=False)
class PromptImage:
    """An image in a prompt: a file's bytes, decoded when the model is to see it, or pixels scaled for the model.

    `grid`: of its tokens, as its first bytes say. `content_hash` tells it from all others: 16 bytes.
    """

    source: bytes | Pixels
    grid: Grid
    config: VisionConfig

    @classmethod
    def of(cls, picture: "Picture", config: VisionConfig) -> "PromptImage":
        """Raises `InvalidRequestError` for what is no image, or of a size that the model cannot be shown."""
        if isinstance(picture, bytes):
            return cls(picture, token_grid(*image_size(picture), config), config)
        if not isinstance(picture, require_pillow().Image):
            raise InvalidRequestError(
                f"must be a file's bytes or a Pillow image, not {type(picture).__name__}", "image"
            )
        return cls(scale(picture, config), token_grid(picture.height, picture.width, config), config)

    @cached_property
    def content_hash(self) -> bytes:
        # Pixels may spell what is another image's file.
        data, kind = (self.source, b"") if isinstance(self.source, bytes) else (self.source.tobytes(), b"pixels")
        return blake2b(data, digest_size=16, key=struct.pack("<II", *self.grid), person=kind).digest()

    def pixels(self) -> Pixels:
        """[height, width, 3] uint8, scaled to whole tokens. Raises `InvalidRequestError` for a file that is broken."""
        if not isinstance(self.source, bytes):
            return self.source
        pixels, factor = decode(self.source, self.config), self.config.factor
        # Its tokens have their places by now.
        if pixels.shape[:2] != (self.grid.rows * factor, self.grid.columns * factor):
            raise InvalidRequestError("has another size than its first bytes say", "image")
        return pixels


class Piece(NamedTuple):
    """Some of an image's tokens, `first` to `last` (exclusive), that stand from `place` on among some others."""

    place: int
    image: PromptImage
    first: int
    last: int

    def between(self, start: int, end: int) -> "Piece | None":
        """What of it stands there, its place counted from `start`; None where nothing does."""
        first = self.first + max(start - self.place, 0)
        last = min(self.last, self.first + end - self.place)
        return Piece(max(self.place - start, 0), self.image, first, last) if first < last else None


class Run(NamedTuple):
    """Tokens of an image that stand together, from `start` of the prompt on: those from `first` on, so many."""

    start: int
    image: PromptImage
    first: int
    length: int


@dataclass(frozen=True, eq=False)
class PromptImages:
    """The images of one prompt, in their order. `runs`: of each its tokens, or its rows where something ends these.

    positions: [3, num_prompt_tokens] int32, of time, height and width, that the prompt's tokens are rotated by.
    A token of index i after the prompt has i + `offset` for all three. `may_be_cut`: a step may compute some of an
    image's tokens without the ones behind them.
    """

    images: tuple[PromptImage, ...]
    runs: tuple[Run, ...]
    positions: NDArray[numpy.int32]
    offset: int
    may_be_cut: bool = True
    _marks: dict[int, dict[int, bytes]] = field(default_factory=dict)

    @classmethod
    def of(cls, token_ids: Sequence[int], images: Sequence[PromptImage], vision: VisionConfig) -> "PromptImages":
        """Raises `InvalidRequestError` where the prompt has another number of image tokens than the images."""
        runs = _runs(token_ids, images, vision)
        if vision.counts_tokens:
            counted = numpy.broadcast_to(numpy.arange(len(token_ids), dtype=numpy.int32), (3, len(token_ids)))
            return cls(tuple(images), runs, counted, 0, may_be_cut=not vision.is_two_way)
        positions = numpy.empty((3, len(token_ids)), dtype=numpy.int32)
        index = position = 0
        for start, image, _, _ in runs:
            end, after = start + image.grid.num_tokens, position + start - index
            positions[:, index:start] = numpy.arange(position, after)
            rows, columns = numpy.divmod(numpy.arange(image.grid.num_tokens), image.grid.columns)
            positions[:, start:end] = after + numpy.stack((numpy.zeros_like(rows), rows, columns))
            index, position = end, after + max(image.grid)
        positions[:, index:] = numpy.arange(position, position + len(token_ids) - index)
        return cls(tuple(images), runs, positions, position - index)

    @property
    def content(self) -> tuple[bytes, ...]:
        return tuple(image.content_hash for image in self.images)

    @property
    def problem(self) -> str | None:
        """What is wrong with the first image that cannot be decoded, if one cannot."""
        for number, image in enumerate(self.images, 1):
            try:
                image.pixels()
            except InvalidRequestError as error:
                return f"image {number} of the prompt {error}"
        return None

    def positions_of(self, start: int, end: int) -> NDArray[numpy.int32]:
        """[3, end - start]: of the sequence's tokens from `start` on."""
        known = self.positions[:, start:end]
        if (num_more := end - start - known.shape[1]) == 0:
            return known
        more = numpy.arange(end - num_more, end, dtype=numpy.int32) + numpy.int32(self.offset)
        return numpy.concatenate((known, numpy.broadcast_to(more, (3, num_more))), axis=1)

    def end_of_step(self, start: int, end: int) -> int:
        """Where a step is to end for which the sequence's tokens from `start` to before `end` were chosen.

        Before an image that it would cut, or behind it where there is nothing before.
        """
        if self.may_be_cut:
            return end
        cut = next((run for run in self.runs if run.start < end < run.start + run.length), None)
        if cut is None:
            return end
        return cut.start if start < cut.start else cut.start + cut.length

    def pieces(self, start: int, end: int) -> Iterator[Piece]:
        """What of the images is among the sequence's tokens from `start` on; places count from there."""
        if not self.runs or start >= self.runs[-1].start + self.runs[-1].length:
            return
        for run in self.runs:
            first, last = max(run.start, start), min(run.start + run.length, end)
            if first < last:
                skipped = run.first - run.start
                yield Piece(first - start, run.image, first + skipped, last + skipped)

    def marks(self, block_size: int) -> dict[int, bytes]:
        """By the indexes of the blocks that have tokens of images: what tells them from those of other images."""
        if (known := self._marks.get(block_size)) is not None:
            return known
        marks: dict[int, bytes] = {}
        for start, image, first, length in self.runs:
            for block in range(start // block_size, (start + length - 1) // block_size + 1):
                mark = image.content_hash + struct.pack("<i", start - first - block * block_size)
                marks[block] = marks.get(block, b"") + mark
        self._marks[block_size] = marks
        return marks


def _runs(token_ids: Sequence[int], images: Sequence[PromptImage], vision: VisionConfig) -> tuple[Run, ...]:
    tokens = numpy.asarray(token_ids if isinstance(token_ids, array) else array("q", token_ids))
    places = numpy.flatnonzero(tokens == vision.image_token_id)
    wanted = sum(image.grid.num_tokens for image in images)
    if len(places) != wanted:
        raise InvalidRequestError(
            f"prompt has {len(places)} image tokens, but its images are {wanted} tokens: expand each place of an image",
            "images",
        )
    runs: list[Run] = []
    used = 0
    for number, image in enumerate(images, 1):
        num_tokens, columns = image.grid.num_tokens, image.grid.columns
        length, gap = (num_tokens, 0) if vision.row_ends is None else (columns, 1)
        indexes = numpy.arange(num_tokens)
        own = places[used : used + num_tokens]
        if not numpy.array_equal(own, own[0] + indexes + indexes // columns * gap):
            raise InvalidRequestError(f"the tokens of image {number} do not stand together in the prompt", "images")
        runs += (Run(int(own[first]), image, first, length) for first in range(0, num_tokens, length))
        used += num_tokens
    return tuple(runs)
