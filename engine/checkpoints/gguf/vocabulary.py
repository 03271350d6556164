"""The tokens that a GGUF file's metadata lists. Free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

from ...errors import ModelError, shown

# What ends a turn, whichever of them the metadata names: as llama.cpp has it.
_STOP_TEXTS = frozenset(
    (
        *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>"),
        *("<end_of_turn>", "<EOT>", "_<EOT>", "[EOT]", "<end_of_utterance>"),
    )
)
_STOP_FIELDS = ("eos", "eot", "eom")


class TokenType(IntEnum):
    """As llama.cpp numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Vocabulary:
    """All tokens by their ids, each with its type; `scores` where the tokenizer's model has such."""

    tokens: list[str]
    types: list[int]
    scores: list[float]

    @cached_property
    def ids(self) -> dict[str, int]:
        return {token: number for number, token in enumerate(self.tokens)}

    @classmethod
    def of(cls, metadata: Mapping[str, Any]) -> "Vocabulary":
        """Raises `KeyError` naming the field where there is none, `ModelError` for others than lists of one length."""
        tokens = texts(metadata, "tokens")
        types = _listed(metadata, "token_type", int, "numbers") or [TokenType.NORMAL] * len(tokens)
        scores = _listed(metadata, "scores", float, "numbers") or [0.0] * len(tokens)
        if not len(tokens) == len(types) == len(scores):
            raise ModelError(
                f"tokenizer.ggml.tokens has {len(tokens)} entries, token_type {len(types)} and scores {len(scores)}: "
                "they must be as many"
            )
        return cls(tokens, types, scores)


def texts(metadata: Mapping[str, Any], name: str) -> list[str]:
    """A list of the tokenizer's. Raises `KeyError` and `ModelError`."""
    if f"tokenizer.ggml.{name}" not in metadata:
        raise KeyError(f"tokenizer.ggml.{name}")
    return _listed(metadata, name, str, "texts")


def _listed(metadata: Mapping[str, Any], name: str, kind: type, called: str) -> list[Any]:
    found = metadata.get(f"tokenizer.ggml.{name}", [])
    # What is in a list has one kind there.
    if not isinstance(found, list) or not all(isinstance(each, kind) for each in found[:1]):
        raise ModelError(f"tokenizer.ggml.{name} must be a list of {called}, not {shown(found)}")
    return found


def special_token_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """The id of `bos`, `eos`, `padding` and the like, where the metadata names one. Raises `ModelError`."""
    number = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if number is not None and (type(number) is not int or number < 0):
        raise ModelError(f"tokenizer.ggml.{name}_token_id is {shown(number)}, which is no token's id")
    return number


def unused_token_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    """What no text is cut into: the vocabulary is filled up with them."""
    types = _listed(metadata, "token_type", int, "numbers")
    return frozenset(number for number, kind in enumerate(types) if kind == TokenType.UNUSED)


def stop_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The tokens that end an answer: those that the metadata names as such, and those known by their text."""
    named = [special_token_id(metadata, name) for name in _STOP_FIELDS]
    found = [number for number in named if number is not None]
    if "tokenizer.ggml.tokens" not in metadata:
        return found
    vocabulary = Vocabulary.of(metadata)
    found += [
        number
        for number, (text, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if text in _STOP_TEXTS and kind != TokenType.NORMAL
    ]
    return list(dict.fromkeys(found))
