"""Tokenizing many texts that repeat long stretches, such as a system prompt, without doing it over and over."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from .words import Packed, WordEncoder, packed


class SegmentEncoder:
    """Encodes texts piece by piece and remembers the pieces that several texts have.

    A tokenizer first cuts a text at its added tokens (`<|im_start|>`) and treats what is between them each for itself,
    so pieces that begin with an added token have the same tokens wherever they stand. Exactly the tokens of the whole
    text come out, but those that a post-processor adds.
    """

    def __init__(self, fast: FastTokenizer) -> None:
        self._fast = fast
        all_added = fast.get_added_tokens_decoder()
        added = [token for token in all_added.values() if not token.normalized]
        self._pattern = _any_of(token.content for token in added)
        self._boundaries = frozenset(token.content for token in added if _is_boundary(token))
        self._known: dict[str, Packed] = {}
        self._added_ids: dict[str, Packed] = {"": b"", **{token.content: packed([n]) for n, token in all_added.items()}}
        # An added token in the middle of a piece is for the tokenizer to find.
        self._words = WordEncoder.of(fast) if len(added) == len(all_added) else None

    def pack_batch(self, texts: Sequence[str]) -> list[Packed]:
        """The token ids of each text, without those that a post-processor adds."""
        if self._pattern is None:
            return self._encode(texts)
        pieces = [self._cut(text) for text in texts]
        counts = Counter(chain.from_iterable(pieces))
        new = [piece for piece in counts if piece not in self._known]
        ids_of = self._known | dict(zip(new, self._encode_pieces(new), strict=True))
        # What this batch repeats, the next one will: only that is kept, and only for as long as it is repeated.
        self._known = {piece: ids_of[piece] for piece, count in counts.items() if count > 1}
        return [b"".join(map(ids_of.__getitem__, cut)) for cut in pieces]

    def _cut(self, text: str) -> list[str]:
        assert self._pattern is not None
        # The text before the first token, then by turns a token and the text after it.
        first, *rest = self._pattern.split(text)
        pieces = [first]
        for token, after in zip(rest[::2], rest[1::2], strict=True):
            if token in self._boundaries:
                pieces.append(token + after)
            else:
                pieces[-1] += token + after
        return pieces if pieces[0] else pieces[1:]

    def _encode_pieces(self, pieces: Sequence[str]) -> list[Packed]:
        """Of pieces that have no added token but the one they begin with."""
        assert self._pattern is not None
        if self._words is None:
            return self._encode(pieces)
        heads = [match.end() if (match := self._pattern.match(piece)) else 0 for piece in pieces]
        tails = self._words.pack_batch([piece[head:] for piece, head in zip(pieces, heads, strict=True)])
        if tails is None:
            return self._encode(pieces)
        ids = [self._added_ids[piece[:head]] for piece, head in zip(pieces, heads, strict=True)]
        return [head + tail for head, tail in zip(ids, tails, strict=True)]

    def _encode(self, texts: Sequence[str]) -> list[Packed]:
        encodings = self._fast.encode_batch_fast(list(texts), add_special_tokens=False)
        return [packed(encoding.ids) for encoding in encodings]


def _is_boundary(token: AddedToken) -> bool:
    """Whether what stands before the token has no part in it."""
    return not token.lstrip and not token.single_word


def _any_of(contents: Iterable[str]) -> re.Pattern[str] | None:
    """Finds, as a group, what the tokenizer finds: the leftmost added token, of several there the longest."""
    escaped = [re.escape(content) for content in sorted(contents, key=len, reverse=True) if content]
    return re.compile(f"({'|'.join(escaped)})") if escaped else None
