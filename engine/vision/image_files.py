"""Image files to pixels, with Pillow. Free of torch."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy
from numpy.typing import NDArray

from ..checkpoints.vision_config import VisionConfig
from ..errors import InvalidRequestError, message_of
from .image_size import check_size, resized

if TYPE_CHECKING:
    from PIL.Image import Image

Pixels = NDArray[numpy.uint8]

# Others run programs, or are none that anybody sends.
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_ORIENTATION = 0x0112
# Of the values that EXIF's orientation has: those that exchange height and width.
_SIDEWAYS = frozenset((5, 6, 7, 8))


def require_pillow() -> Any:
    """Pillow's `Image`. Raises `InvalidRequestError` where it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise InvalidRequestError("needs Pillow, which is not installed: pip install 'headrace[images]'") from error
    return Image


def image_size(data: bytes) -> tuple[int, int]:
    """Height and width of an image as it is to be seen, read from its first bytes; its pixels are not decoded.

    Raises `InvalidRequestError` for what is no image.
    """
    with _opened(data) as image:
        width, height = image.size
        return (width, height) if _orientation(image) in _SIDEWAYS else (height, width)


def decode(data: bytes, config: VisionConfig) -> Pixels:
    """The pixels of an image file, turned as its EXIF data say and scaled for the model: [height, width, 3].

    Raises `InvalidRequestError` for what is no image, is broken or too large.
    """
    with _opened(data) as image:
        orientation = _orientation(image)
        check_size(image.height, image.width)
        try:
            image.load()
            turn = _TURNS.get(orientation)
            return scale(image if turn is None else image.transpose(require_pillow().Transpose(turn)), config)
        except InvalidRequestError:
            raise
        # Pillow raises whatever a damaged file makes it stumble over, and for colours that it cannot convert.
        except Exception as error:
            raise _unreadable(error) from error


def scale(image: "Image", config: VisionConfig) -> Pixels:
    """The pixels of an opened image, scaled for the model: [height, width, 3]. Raises `InvalidRequestError`."""
    check_size(image.height, image.width)
    height, width = resized(image.height, image.width, config)
    # As the model was trained: transparency is left out, not put on a background.
    colours = image if image.mode == "RGB" else image.convert("RGB")
    resampling = require_pillow().Resampling[config.resampling.upper()]
    return numpy.array(colours.resize((width, height), resampling))


@contextmanager
def _opened(data: bytes) -> "Iterator[Image]":
    pillow = require_pillow()
    try:
        image = pillow.open(BytesIO(data), formats=_FORMATS)
    # As above.
    except Exception as error:
        raise _unreadable(error) from error
    with image:
        yield image


def _orientation(image: "Image") -> int:
    """As a file's beginning says it: what stands after the pixels is not looked for."""
    if "exif" not in image.info:
        return 1
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    # What damaged EXIF data say is nothing.
    except Exception:  # noqa: BLE001
        return 1


# Of EXIF's orientations, as numbers of Pillow's `Transpose`.
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}


def _unreadable(error: Exception) -> InvalidRequestError:
    what = message_of(error) if not str(error).startswith("cannot identify") else "neither of these formats"
    return InvalidRequestError(f"is no image that can be read ({', '.join(_FORMATS)}): {what}", "image")
