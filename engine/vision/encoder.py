"""Images' vectors put in their tokens' places, each image encoded once for all steps that compute its tokens."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import InvalidRequestError
from .prompt_images import Piece, PromptImage
from .tower import VisionTower


@dataclass(frozen=True)
class ImageTokens:
    """Which of a step's tokens are images', and all its tokens' positions: [3, num_tokens] int64."""

    pieces: Sequence[Piece]
    positions: Tensor


class ImageEncoder:
    """Encodes images, and keeps the latest: a prompt's chunks come soon after each other, and so do equal images.

    `num_kept_tokens`: of how many images' tokens vectors are kept; the last image's are in any case. Whatever is
    forgotten is encoded again. An image that is broken becomes NaNs: so its prompt's logits are none, and the others'
    are not touched. `num_encoded`: how many images were.
    """

    def __init__(self, tower: VisionTower, num_kept_tokens: int) -> None:
        self._tower = tower
        self._num_kept_tokens = num_kept_tokens
        self._encoded: OrderedDict[bytes, Tensor] = OrderedDict()
        self.num_encoded = 0

    def put(self, embedded: Tensor, pieces: Sequence[Piece]) -> None:
        """Overwrite the places of `pieces` with what their images are. embedded: [num_tokens, hidden_size]."""
        for place, image, first, last in pieces:
            embedded[place : place + last - first] = self._vectors(image)[first:last]

    def _vectors(self, image: PromptImage) -> Tensor:
        """[num_tokens, hidden_size]."""
        vectors = self._encoded.pop(image.content_hash, None)
        if vectors is None:
            vectors = self._encode(image)
        self._encoded[image.content_hash] = vectors
        while len(self._encoded) > 1 and sum(map(len, self._encoded.values())) > self._num_kept_tokens:
            self._encoded.popitem(last=False)
        return vectors

    def _encode(self, image: PromptImage) -> Tensor:
        try:
            pixels = image.pixels()
        except InvalidRequestError:
            return self._tower.nothing(image.grid)
        self.num_encoded += 1
        return self._tower.encode(torch.from_numpy(pixels))
