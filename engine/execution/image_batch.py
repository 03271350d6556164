"""Steps with prompts that have images: positions on three axes, and the images' tokens among the others.

Where an image's tokens see all of it, also who sees whom. The last layer, which computes sequences' last tokens alone,
needs none of that: behind them is nothing.
"""

from bisect import bisect_right
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import numpy

from ...kernels.paged_attention import AttentionMetadata, Span
from ..scheduling.decode_rows import DecodeRows
from ..scheduling.scheduled_sequence import ScheduledSequence
from ..vision.encoder import ImageTokens
from ..vision.prompt_images import Piece
from .batch import Batch


def with_image_positions(batch: Batch, scheduled: SequenceOf[ScheduledSequence]) -> Batch:
    """The batch as its sequences' images have it; the same where none has any. Sequences' counts are up to date.

    A step without a token of an image has one position a token, as if there were no images.
    """
    if all(item.sequence.images is None for item in scheduled):
        return batch
    positions = numpy.broadcast_to(batch.places[1], (3, batch.places.shape[1])).copy()
    pieces: list[Piece] = []
    begin = 0
    for sequence, num_tokens, _, _, _ in scheduled:
        if (images := sequence.images) is not None:
            start = sequence.num_computed_tokens
            positions[:, begin : begin + num_tokens] = images.positions_of(start, start + num_tokens)
            pieces += [each._replace(place=begin + each.place) for each in images.pieces(start, start + num_tokens)]
        begin += num_tokens
    if not pieces:
        return replace(batch, places=numpy.stack((batch.places[0], positions[0])))
    return replace(batch, images=ImageTokens(pieces, positions))


def with_spans(attention: AttentionMetadata, images: ImageTokens) -> AttentionMetadata:
    """The layout with the spans of images whose tokens see all of it; the same where there are none."""
    spans = [_span(attention, piece) for piece in images.two_way_pieces]
    return replace(attention, spans=spans) if spans else attention


def _span(attention: AttentionMetadata, piece: Piece) -> Span:
    assert piece.last == piece.image.grid.num_tokens, "an image is cut"
    row, length = bisect_right(attention.query_starts, piece.place) - 1, piece.last - piece.first
    num_behind = attention.query_starts[row] + attention.query_lens[row] - piece.place - length
    end, in_windows = attention.context_lens[row] - num_behind, piece.image.config.two_way_layers == "windows"
    return Span(piece.place, length, end, attention.block_tables[row], in_windows)


def with_image_offsets(batch: Batch, decodes: DecodeRows) -> Batch:
    """As `with_image_positions`, of sequences that decode a token each."""
    offsets = [0 if each.images is None else each.images.offset for each in decodes.sequences]
    if not any(offsets):
        return batch
    places = batch.places.copy()
    places[1] += numpy.array(offsets)
    return replace(batch, places=places)
