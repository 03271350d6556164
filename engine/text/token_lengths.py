"""How long a text may be for so many tokens, known without tokenizing it."""

import json
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

_BYTE_FALLBACK = frozenset(f"<0x{byte:02X}>" for byte in range(256))
# What a normalizer makes one character of, at most: no character decomposes into more (Unicode 16, canonically).
_COMPOSED_OF = {"NFC": 4, "NFKC": 4, "NFD": 1, "NFKD": 1, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1}
# They cut a text or replace characters one by one, and leave nothing out.
_KEEP_ALL = frozenset(("ByteLevel", "Digits", "Metaspace", "Split", "Punctuation", "UnicodeScripts"))


def characters_per_token(fast: FastTokenizer) -> int | None:
    """The most characters of a text that one token stands for.

    None for tokenizers that may leave characters out, or give one token for any number of unknown ones. It is known
    for BPE over bytes, and for BPE that falls back to bytes.
    """
    state = json.loads(fast.to_str())
    vocabulary = fast.get_vocab(with_added_tokens=True)
    normalizers = _steps(state["normalizer"], "normalizers")
    pre_tokenizers = _steps(state["pre_tokenizer"], "pretokenizers")
    shrink = _shrink(normalizers)
    if shrink is None or not isinstance(fast.model, BPE) or not all(map(_keeps_all, pre_tokenizers)):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"]):
        return None
    is_over_bytes = any(step["type"] == "ByteLevel" for step in (*normalizers, *pre_tokenizers))
    if not _knows_every_character(state["model"], frozenset(vocabulary), is_over_bytes):
        return None
    return shrink * max(map(len, vocabulary))


def _steps(state: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    """A part of a tokenizer, or those it consists of."""
    if state is None:
        return []
    if state["type"] != "Sequence":
        return [state]
    return [step for each in state[name] for step in _steps(each, name)]


def _shrink(normalizers: list[dict[str, Any]]) -> int | None:
    """How many characters become one at most."""
    shrink = 1
    for step in normalizers:
        if step["type"] == "Replace":
            pattern = step["pattern"].get("String")
            if pattern is None or len(step["content"]) < len(pattern):
                return None
        elif (composed := _COMPOSED_OF.get(step["type"])) is None:
            return None
        else:
            shrink *= composed
    return shrink


def _keeps_all(step: dict[str, Any]) -> bool:
    return step["type"] in _KEEP_ALL and step.get("behavior") != "Removed"


def _knows_every_character(model: dict[str, Any], vocabulary: frozenset[str], is_over_bytes: bool) -> bool:
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    if is_over_bytes:
        return vocabulary.issuperset(ByteLevel.alphabet())
    return bool(model.get("byte_fallback")) and vocabulary >= _BYTE_FALLBACK
