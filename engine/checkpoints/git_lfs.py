"""Files that Git has not fetched: in their places lie some lines that say where they are."""

from pathlib import Path

_BEGINNING = b"version https://git-lfs.github.com/"


def damage(file: Path, otherwise: str) -> str:
    """What is wrong with a file that is not what it should be, as the end of a sentence about it."""
    with file.open("rb") as stream:
        is_pointer = stream.read(len(_BEGINNING)) == _BEGINNING
    return "is a pointer of Git LFS, not the file itself: fetch it with git lfs pull" if is_pointer else otherwise
