"""Images between tokens of their own in a prompt's, and between newlines, as Gemma's are. Free of torch."""

from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from ..checkpoints.model_folder import read_json_object
from ..checkpoints.vision_config import VisionConfig
from ..errors import InvalidRequestError, ModelError
from .image_size import Grid

# Before an image, and behind it.
_NUM_NEWLINES = 2


def framed(token_ids: Sequence[int], grids: Iterator[Grid], vision: VisionConfig) -> "array[int]":
    """The prompt with each image's tokens and what is around them, as if its text had had them when it was tokenised.

    Newlines side by side are one token, as far as the tokenizer has one for so many: an image's run into those of the
    text around it, and into the next image's. Raises `InvalidRequestError` where the tokenizer has none.
    """
    frame = vision.frame
    assert frame is not None
    numbers: Mapping[int, int] = {}
    num_around = 0
    if frame.newlines is not None:
        numbers, num_around = _newline_tokens(frame.newlines), _NUM_NEWLINES
    tokens = array("i")
    # Newlines since the last token that is none: the text's tokens as they came, and how many newlines images add.
    held: list[int] = []
    num_added = 0
    for token in token_ids:
        if token in numbers:
            held.append(token)
            continue
        if token == vision.place_token_id:
            num_added += num_around
        tokens.extend(_joined(held, num_added, numbers))
        held, num_added = [], 0
        if token == vision.place_token_id:
            tokens.extend((frame.start, *[vision.image_token_id] * next(grids).num_tokens, frame.end))
            num_added = num_around
        else:
            tokens.append(token)
    tokens.extend(_joined(held, num_added, numbers))
    return tokens


def _joined(held: Sequence[int], num_added: int, numbers: Mapping[int, int]) -> Sequence[int]:
    """Newlines and those that an image adds, as few tokens as there may be; `numbers`: how many each token is."""
    if not num_added:
        return held
    left = num_added + sum(numbers[token] for token in held)
    joined = []
    for token, number in numbers.items():
        joined += [token] * (left // number)
        left %= number
    return joined


@lru_cache(maxsize=16)
def _newline_tokens(folder: Path) -> Mapping[int, int]:
    """How many newlines each token is that is nothing else, the longest first. Raises `InvalidRequestError`."""
    try:
        content = read_json_object(folder / "tokenizer.json")
    except ModelError as error:
        raise InvalidRequestError(f"needs a tokenizer for images: {error}", "image") from error
    words = dict((content.get("model") or {}).get("vocab") or {})
    words |= {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
    found = {int(number): len(word) for word, number in words.items() if word and not word.strip("\n")}
    if 1 not in found.values():
        raise InvalidRequestError(f"{folder / 'tokenizer.json'} has no token for a newline: images need one", "image")
    return dict(sorted(found.items(), key=lambda item: -item[1]))
