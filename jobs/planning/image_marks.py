"""Images in the key that rows are sorted by: prompts with other images have less in common than their tokens."""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

import numpy

from .rendering import IllustratedPrompt

# Above all tokens of all models.
_FIRST_MARK = 2**30


def marked(token_ids: Sequence[int], shown: IllustratedPrompt, image_token_id: int) -> "array[int]":
    """The tokens with a mark of its image in the place of each image token."""
    tokens = numpy.array(token_ids, dtype=numpy.int32)
    marks = [_FIRST_MARK + int.from_bytes(blake2b(file, digest_size=4).digest()) % _FIRST_MARK for file in shown.files]
    tokens[tokens == image_token_id] = numpy.repeat(marks, [grid.num_tokens for grid in shown.grids])
    return array("i", tokens.tobytes())


def unmarked(marks: "array[int]", image_token_id: int) -> "array[int]":
    """The tokens that `marked` was given."""
    tokens = numpy.array(marks, dtype=numpy.int32)
    tokens[tokens >= _FIRST_MARK] = image_token_id
    return array("i", tokens.tobytes())
