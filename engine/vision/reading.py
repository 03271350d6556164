"""From what a user sends to a prompt with images: messages, addresses, and places for tokens. Free of torch."""

import base64
import binascii
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from ..checkpoints.model_config import ModelConfig
from ..checkpoints.model_folder import read_json_object
from ..checkpoints.vision_config import RowEnds, VisionConfig
from ..errors import InvalidRequestError, ModelError
from .framed import framed
from .image_files import image_size
from .image_size import Grid, num_places, token_grid
from .prompt_images import Picture, PromptImage

_DATA_URL = re.compile(r"data:[\w.+-]+/[\w.+-]+(;[\w.+-]+=[^;,]*)*;base64,", re.IGNORECASE)
# What a message's part is that is an image; the first two are OpenAI's and vLLM's.
IMAGE_PARTS = ("image_url", "image_pil", "image")
_SHORT = 100

P = TypeVar("P")
T = TypeVar("T")


@dataclass(frozen=True)
class ImageReader:
    """What a model can do with images: all of it is refused where it has no `vision`. `model`: its name, for errors."""

    vision: VisionConfig | None
    model: str

    @classmethod
    def of_model(cls, folder: Path, name: str = "") -> "ImageReader":
        """That of a model's folder, read once in a process. Raises `ModelError`."""
        return cls(_vision_of(folder), name or folder.name)

    def split(
        self, messages: Sequence[Mapping[str, Any]], others: Iterable[Picture] = ()
    ) -> tuple[list[Mapping[str, Any]], list[Picture]]:
        """As `split_images`."""
        self._require()
        return split_images(messages, others)

    def images(self, pictures: Iterable[Picture]) -> tuple[PromptImage, ...]:
        """Raises `InvalidRequestError` naming the image at fault."""
        return tuple(self._of_image(number, picture, PromptImage.of) for number, picture in enumerate(pictures, 1))

    def grids(self, files: Iterable[bytes]) -> tuple[Grid, ...]:
        """The tokens of image files, by their first bytes. Raises as `images` does."""
        return tuple(self._of_image(number, data, _grid) for number, data in enumerate(files, 1))

    def expanded(
        self, token_ids: Sequence[int], grids: Sequence[Grid], check_length: Callable[[int], None] = lambda _: None
    ) -> "array[int]":
        """The prompt with all tokens of an image where it had one that stands for it.

        `check_length` may refuse so many tokens, before they are made where images have any number of them: some bytes
        may claim to be billions. Raises `InvalidRequestError` where there are more places than images, or less.
        """
        vision = self._require()
        if (num_found := sum(token == vision.place_token_id for token in token_ids)) != len(grids):
            raise InvalidRequestError(
                f"prompt has {num_found} places for images (token {vision.place_token_id}) and {len(grids)} images",
                "prompt",
            )
        rest = iter(grids)
        if vision.frame is not None:
            framed_ids = framed(token_ids, rest, vision)
            check_length(len(framed_ids))
            return framed_ids
        check_length(len(token_ids) + sum(num_places(grid, vision) - 1 for grid in grids))
        expanded = array("i")
        for token in token_ids:
            expanded.extend(_places(next(rest), vision) if token == vision.image_token_id else (token,))
        return expanded

    def _of_image(self, number: int, picture: P, read: Callable[[P, VisionConfig], T]) -> T:
        vision = self._require()
        try:
            return read(picture, vision)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"image {number} of the prompt {error}", "image") from error

    def _require(self) -> VisionConfig:
        if self.vision is None:
            raise InvalidRequestError(f"model {self.model} reads no images: leave them out", "image")
        return self.vision


@lru_cache(maxsize=16)
def _vision_of(folder: Path) -> VisionConfig | None:
    return ModelConfig.from_pretrained(folder).vision


def _places(grid: Grid, vision: VisionConfig) -> list[int]:
    """The tokens that stand for an image."""
    token = vision.image_token_id
    if vision.row_ends is None:
        return [token] * grid.num_tokens
    row_end, image_end = _row_ends(vision.row_ends)
    return ([token] * grid.columns + [row_end]) * (grid.rows - 1) + [token] * grid.columns + [image_end]


@lru_cache(maxsize=16)
def _row_ends(ends: RowEnds) -> tuple[int, int]:
    """Raises `InvalidRequestError` where the tokenizer has none of this name."""
    try:
        tokens = read_json_object(ends.folder / "tokenizer.json").get("added_tokens") or ()
    except ModelError as error:
        raise InvalidRequestError(f"needs a tokenizer for images: {error}", "image") from error
    ids = {token["content"]: int(token["id"]) for token in tokens}
    for name in (ends.row, ends.image):
        if name not in ids:
            raise InvalidRequestError(f"{ends.folder / 'tokenizer.json'} has no token {name}, which ends rows", "image")
    return ids[ends.row], ids[ends.image]


def _grid(data: bytes, vision: VisionConfig) -> Grid:
    return token_grid(*image_size(data), vision)


def has_images(messages: Any) -> bool:
    """Whether any of a conversation's messages has a part that is an image."""
    return any(
        isinstance(part, Mapping) and part.get("type") in IMAGE_PARTS
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), list)
        for part in message["content"]
    )


def split_images(
    messages: Sequence[Mapping[str, Any]], others: Iterable[Picture] = ()
) -> tuple[list[Mapping[str, Any]], list[Picture]]:
    """Messages as templates of models that read images want them, and the images, in their order.

    `others`: what is meant by parts {"type": "image"} that have none. Raises `InvalidRequestError` naming the image
    that is none.
    """
    unnamed = iter(others)
    pictures: list[Picture] = []
    plain: list[Mapping[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list):
            plain.append(message)
            continue
        parts = []
        for part in content:
            if part.get("type") in IMAGE_PARTS:
                pictures.append(_picture(part, len(pictures) + 1, unnamed))
                parts.append({"type": "image"})
            else:
                # In a table every part has the fields of all, and templates look at which there are.
                parts.append({name: value for name, value in part.items() if value is not None})
        plain.append({**message, "content": parts})
    return plain, pictures


def files_of(pictures: Sequence[Picture]) -> tuple[bytes, ...]:
    """Images of messages where these come as JSON. Raises `InvalidRequestError` for one that is no file."""
    files = tuple(each for each in pictures if isinstance(each, bytes))
    if len(files) < len(pictures):
        raise InvalidRequestError("an image must be a data URL: data:image/png;base64,...", "image")
    return files


def _picture(part: Mapping[str, Any], number: int, unnamed: Iterator[Picture]) -> Picture:
    given: Any = part.get(part["type"])
    if part["type"] != "image_url":
        picture = given if given is not None else next(unnamed, None)
        if picture is None:
            raise InvalidRequestError(f"image {number} of the prompt is not there: its part has no content", "image")
        return picture
    try:
        return data_url_bytes(given.get("url") if isinstance(given, Mapping) else given)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"image {number} of the prompt {error}", "image_url") from error


def shortened(address: str) -> str:
    """For errors: what is no address may be a whole file."""
    return address if len(address) <= _SHORT else f"{address[: _SHORT - 3]}..."


def data_url_bytes(url: Any) -> bytes:
    """What a data URL holds. Raises `InvalidRequestError`: nothing is fetched from elsewhere."""
    if not isinstance(url, str):
        raise InvalidRequestError("has no url", "image_url")
    if (head := _DATA_URL.match(url)) is None:
        raise InvalidRequestError(
            f"is at {shortened(url)!r}, and nothing is fetched from there: "
            "send it inline, as data:image/png;base64,...",
            "image_url",
        )
    try:
        return base64.b64decode(url[head.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequestError(f"is no valid base64: {error}", "image_url") from error
