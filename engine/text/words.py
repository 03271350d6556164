"""Cutting texts where a tokenizer cuts them anyway, so that a word is encoded once however often it comes."""

import json
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

from .split_patterns import GPT2, LLAMA3, QWEN2

# What is known to begin anew at a space after something else.
_PATTERNS = frozenset((GPT2, LLAMA3, QWEN2))

# A word with the white space before it. Other white space than a space is never cut off from what is before it.
_WORD = re.compile(r"\s*\S+(?:[^\S ]\s*(?:\S+|$))*|\s+")
# The same where every digit is a token of its own.
_WORD_OR_DIGIT = re.compile(r"\s*(?:[0-9]|[^\s0-9]+(?:[^\S ]\s*(?:[^\s0-9]+|[0-9]|$))*)|\s+")

# Tokens as they are kept and put together: 32 bits each, in this machine's order of bytes.
Packed = bytes

_MAX_KNOWN = 50_000
# Of all words together: a word may be as long as a text, and a token of it takes dozens of bytes.
_MAX_KNOWN_CHARACTERS = 2_000_000
# Texts that begin alike for fewer characters than this are looked through for themselves.
_LEAST_ALIKE = 500
# Of more words that are new than this, remembering costs more than it saves.
_MAX_NEW = 0.25


class WordEncoder:
    """Encodes texts word by word and remembers the words.

    `of` gives one for tokenizers that begin a token at every space which follows something else, as byte-level BPE
    does with the usual patterns; exactly the tokens of the whole text come out.
    """

    def __init__(self, fast: FastTokenizer, words: re.Pattern[str]) -> None:
        self._fast = fast
        self._words = words
        self._known: dict[str, Packed] = {}
        self._num_characters = 0

    @classmethod
    def of(cls, fast: FastTokenizer) -> "WordEncoder | None":
        """None for a tokenizer of another kind."""
        if not isinstance(fast.model, BPE) or fast.model.dropout or not _leaves_spaces(fast.normalizer):
            return None
        if any(token.lstrip or token.rstrip or token.single_word for token in fast.get_added_tokens_decoder().values()):
            return None
        steps = _steps(_state(fast.pre_tokenizer))
        if not any(map(_cuts_at_spaces, steps)) or not all(map(_is_known, steps)):
            return None
        return cls(fast, _WORD_OR_DIGIT if any(map(_cuts_at_digits, steps)) else _WORD)

    def pack_batch(self, texts: Sequence[str]) -> list[Packed] | None:
        """The token ids of each text; None where too many of its words are new. No text holds an added token."""
        beginnings, cut = self._cut(texts)
        num_words = sum(len(beginnings[which]) + len(words) for which, words in cut)
        each = [*beginnings, *(words for _, words in cut)]
        known = self._known
        new = list({word for word in chain.from_iterable(each) if word not in known})
        num_characters = sum(map(len, new))
        if len(new) > _MAX_NEW * num_words or num_characters > _MAX_KNOWN_CHARACTERS:
            return None
        if len(known) + len(new) > _MAX_KNOWN or self._num_characters + num_characters > _MAX_KNOWN_CHARACTERS:
            # A new one: another thread may be reading what was known.
            known = self._known = {}
            new = list(set(chain.from_iterable(each)))
            self._num_characters, num_characters = 0, sum(map(len, new))
        self._num_characters += num_characters
        encodings = self._fast.encode_batch_fast(new, add_special_tokens=False)
        known.update((word, packed(encoding.ids)) for word, encoding in zip(new, encodings, strict=True))
        begun = [b"".join(map(known.__getitem__, words)) for words in beginnings]
        return [begun[which] + b"".join(map(known.__getitem__, words)) for which, words in cut]

    def _cut(self, texts: Sequence[str]) -> tuple[list[list[str]], list[tuple[int, list[str]]]]:
        """Words that several texts, one after the other, begin with; of each text which of these, and its other words.

        What is long and begins as the text before is not looked through again.
        """
        beginnings: list[list[str]] = [[]]
        cut: list[tuple[int, list[str]]] = []
        # `held`: the text of the last beginning, and a character more, with which it is sure to end.
        before, held, which = "", "", 0
        for text in texts:
            if len(text) < _LEAST_ALIKE:
                cut.append((0, self._words.findall(text)))
                continue
            size = len(held)
            if not text.startswith(held) or text[size : size + _LEAST_ALIKE] == before[size : size + _LEAST_ALIKE]:
                words = self._alike(text, before)
                held, which = text[: sum(map(len, words)) + 1] if words else "", len(beginnings) if words else 0
                if words:
                    beginnings.append(words)
            cut.append((which, self._words.findall(text, max(len(held) - 1, 0))))
            before = text
        return beginnings, cut

    def _alike(self, text: str, other: str) -> list[str]:
        """The words that both begin with; none where that is little."""
        if text[:_LEAST_ALIKE] != other[:_LEAST_ALIKE]:
            return []
        lengths = range(1, min(len(text), len(other)) + 1)
        alike = text[: bisect_left(lengths, True, key=lambda length: text[:length] != other[:length])]
        # The last one may go on.
        words: list[str] = self._words.findall(alike)[:-1]
        return words


def packed(token_ids: Iterable[int]) -> Packed:
    return array("i", token_ids).tobytes()


def _state(component: Any) -> dict[str, Any]:
    """A part of a tokenizer as its file describes it."""
    return {} if component is None else dict(json.loads(component.__getstate__()))


def _steps(state: dict[str, Any]) -> list[dict[str, Any]]:
    return state["pretokenizers"] if state.get("type") == "Sequence" else [state]


def _leaves_spaces(normalizer: Any) -> bool:
    return normalizer is None or _state(normalizer).get("type") == "NFC"


def _is_known(step: dict[str, Any]) -> bool:
    """Whether what a step makes of a text is the same word by word."""
    is_byte_level = step.get("type") == "ByteLevel" and not step["add_prefix_space"]
    return is_byte_level or _cuts_at_digits(step) or _pattern(step) in _PATTERNS


def _cuts_at_spaces(step: dict[str, Any]) -> bool:
    return (step.get("type") == "ByteLevel" and bool(step["use_regex"])) or _pattern(step) in _PATTERNS


def _cuts_at_digits(step: dict[str, Any]) -> bool:
    """Whether every digit is cut off from what is around it."""
    return (step.get("type") == "Digits" and bool(step["individual_digits"])) or _pattern(step) == QWEN2


def _pattern(step: dict[str, Any]) -> str | None:
    if step.get("type") != "Split" or step["behavior"] != "Isolated" or step["invert"]:
        return None
    pattern: str | None = step["pattern"].get("Regex")
    return pattern
