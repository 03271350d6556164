"""The disturbed workers' model: the fake one, whose tokens are such that JSON can be spelled with them."""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import decoders

from ..jobs.models import write_model_folder

# Each a character: what a grammar forces is tokenized by itself.
WORDS = ("<end>", "[", "]", ",", *"0123456")
CONTEXT = 256


def write_model(folder: Path) -> Path:
    return write_model_folder(folder, words=WORDS, decoder=decoders.ByteLevel(), max_position_embeddings=CONTEXT)


def prompt_of(row: int) -> list[int]:
    """Unlike that of any other row below 8,000, and neither one that kills workers nor a live request's."""
    return [1 + row % 8, *(1 + int(digit) for digit in f"{row // 8:03d}")]


def prompt_text(row: int) -> str:
    return " ".join(WORDS[token] for token in prompt_of(row))


def text_of(token_ids: Sequence[int]) -> str:
    return "".join(WORDS[token] for token in token_ids if token != 0)
