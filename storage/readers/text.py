"""What the formats of text have in common: what is said of a text that is not UTF-8, and what makes it so."""

import codecs
import re

from ..errors import InputError
from .location import Location

_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_NO_TEXT = {
    b"\x1f\x8b": "compressed with gzip: let its name end in {}.gz",
    b"(\xb5/\xfd": "compressed with zstd: let its name end in {}.zst",
    b"PAR1\x15": "Parquet: let its name end in .parquet",
    b"PK\x03\x04": "a zip file, as spreadsheets are: save it as {}",
}
# Of the word that a byte is in, on either side.
_MAX_SHOWN = 20
_WORD_BEGINS, _WORD_ENDS = re.compile(r"^[\w’'-]*"), re.compile(r"[\w’'-]*$")


def expect_text(location: Location) -> None:
    """Raises InputError for UTF-16, which some spreadsheets save, and for what is no text by how it begins."""
    with location.open() as file:
        start = file.read(64)
    if (encoding := _utf16(start)) is not None:
        raise InputError(f"input {location.name} is UTF-16: save it as UTF-8 ({_iconv(encoding)})")
    for beginning, what in _NO_TEXT.items():
        if start.startswith(beginning):
            raise InputError(f"input {location.name} is {what.format(location.format)}")


def not_utf8(text: bytes) -> str:
    """What is said of a text that is not UTF-8: what to do, and by which word to see whether it is right."""
    if (encoding := _utf16(text[:64])) is not None:
        return f"not valid UTF-8 but UTF-16: convert the file ({_iconv(encoding)})"
    try:
        text.decode()
    except UnicodeDecodeError as error:
        if (word := _word_in_windows_1252(text, error.start)) is not None:
            return f"not valid UTF-8: convert the file ({_iconv('WINDOWS-1252')}, if {word!r} is what it says)"
    return f"not valid UTF-8: convert the file ({_iconv('ENCODING')}, with the one that it has)"


def _iconv(encoding: str) -> str:
    return f"iconv -f {encoding} -t UTF-8"


def _utf16(start: bytes) -> str | None:
    """The encoding of a text that begins so, if it is UTF-16: by its mark, or by a zero in each of its characters."""
    if start.startswith(_UTF16_MARKS):
        return "UTF-16"
    if len(start) < 4:
        return None
    zeros = ("UTF-16LE", start[1::2]), ("UTF-16BE", start[::2])
    return next((encoding for encoding, halves in zeros if not any(halves)), None)


def _word_in_windows_1252(text: bytes, at: int) -> str | None:
    """The word around a byte as most of Europe's spreadsheets have saved it; None where that makes no word."""
    parts = text[max(0, at - _MAX_SHOWN) : at], text[at : at + _MAX_SHOWN]
    # A byte a character; five of the bytes are none.
    before, after = (part.decode("cp1252", "replace") for part in parts)
    if after[0] == "\N{REPLACEMENT CHARACTER}" or not after[0].isprintable():
        return None
    word: str = _WORD_ENDS.findall(before)[0] + after[0] + _WORD_BEGINS.findall(after[1:])[0]
    return word
