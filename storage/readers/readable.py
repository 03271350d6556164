"""What can be wrong with any input, as errors that name it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa

from ..errors import InputError


@contextmanager
def readable(name: str) -> Iterator[None]:
    """The errors of reading an input as InputError."""
    try:
        yield
    except (OSError, EOFError, pa.ArrowException, UnicodeDecodeError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise InputError(f"input {name} cannot be read: {reason}") from error


def refuse_duplicates(name: str, columns: Sequence[str]) -> None:
    """Raises InputError when two columns have one name."""
    for column, count in Counter(columns).items():
        if count > 1:
            raise InputError(f"input {name} has {count} columns named {column!r}: rename all but one")


def is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
