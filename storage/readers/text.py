"""What the formats of text have in common."""

import codecs

from ..errors import InputError
from .location import Location


def refuse_utf16(location: Location) -> None:
    """Raises InputError for what some spreadsheets save as text."""
    with location.open() as file:
        if file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
            raise InputError(f"input {location.name} is UTF-16: save it as UTF-8")
