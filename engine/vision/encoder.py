"""Images' vectors put in their tokens' places, each image encoded once for all steps that compute its tokens."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import InvalidRequestError
from .prompt_images import Piece, PromptImage
from .tower import VisionTower


@dataclass(frozen=True)
class ImageTokens:
    """Which of a step's tokens are images', and all its tokens' positions: [3, num_tokens] int64, on the host."""

    pieces: Sequence[Piece]
    positions: NDArray[numpy.int64]

    @property
    def two_way_pieces(self) -> list[Piece]:
        """Those of images whose tokens see each other in both directions: each goes to its image's end."""
        return [piece for piece in self.pieces if piece.image.config.is_two_way]

    def between(self, start: int, end: int) -> "ImageTokens":
        """Those of the tokens from one of the step's to before another."""
        cut = (piece.between(start, end) for piece in self.pieces)
        return ImageTokens([piece for piece in cut if piece is not None], self.positions[:, start:end])


@dataclass(frozen=True)
class SeenImages:
    """What a step's images are to the decoder.

    parts: where among the step's tokens each begins, and what its tokens are: [num_levels, n, hidden_size].
    """

    parts: Sequence[tuple[int, Tensor]]

    def put(self, embedded: Tensor) -> None:
        """Overwrite the images' tokens. embedded: [num_tokens, hidden_size]."""
        for place, vectors in self.parts:
            embedded[place : place + vectors.shape[1]] = vectors[0]

    def hide(self, token_ids: Tensor, other: int) -> Tensor:
        """The tokens with `other` in the place of each of the images'."""
        hidden = token_ids.clone()
        for place, vectors in self.parts:
            hidden[place : place + vectors.shape[1]] = other
        return hidden

    def add(self, layer: int, hidden: Tensor) -> None:
        """Add, in place, what belongs to what comes out of the decoder's layer of this index, if anything does."""
        for place, vectors in self.parts:
            if layer + 1 < len(vectors):
                hidden[place : place + vectors.shape[1]] += vectors[layer + 1]


class ImageEncoder:
    """Encodes images, and keeps the latest: a prompt's chunks come soon after each other, and so do equal images.

    `num_kept_vectors`: how many of images' vectors are kept; the last image's are in any case. Whatever is forgotten is
    encoded again. An image that is broken becomes NaNs: so its prompt's logits are none, and the others' are not
    touched. `num_encoded`: how many images were.
    """

    def __init__(self, tower: VisionTower, num_kept_vectors: int) -> None:
        self._tower = tower
        self._num_kept_vectors = num_kept_vectors
        self._encoded: OrderedDict[bytes, Tensor] = OrderedDict()
        self.num_encoded = 0

    def see(self, pieces: Sequence[Piece]) -> SeenImages:
        return SeenImages([(place, self._vectors(image)[:, first:last]) for place, image, first, last in pieces])

    def _vectors(self, image: PromptImage) -> Tensor:
        """[num_levels, num_tokens, hidden_size]."""
        vectors = self._encoded.pop(image.content_hash, None)
        if vectors is None:
            vectors = self._encode(image)
        self._encoded[image.content_hash] = vectors
        while len(self._encoded) > 1 and self._num_vectors > self._num_kept_vectors:
            self._encoded.popitem(last=False)
        return vectors

    @property
    def _num_vectors(self) -> int:
        return sum(each.shape[0] * each.shape[1] for each in self._encoded.values())

    def _encode(self, image: PromptImage) -> Tensor:
        try:
            pixels = image.pixels()
        except InvalidRequestError:
            return self._tower.nothing(image.grid)
        self.num_encoded += 1
        return self._tower.encode(torch.from_numpy(pixels))
