"""Paths as users write them. Free of torch."""

import os
from pathlib import Path


def absolute_path(path: str | Path) -> Path:
    """With the home folder that a ~ stands for, and without `..`. Raises `ValueError` where a ~ stands for none."""
    try:
        return _without_dots(Path(path).expanduser().absolute())
    except RuntimeError as error:
        name = Path(path).parts[0]
        whose = f"there is no user {name.removeprefix('~')} here" if name != "~" else "this user has no home folder"
        raise ValueError(f"{path} begins with {name}, and {whose}: write the path out") from error


def _without_dots(path: Path) -> Path:
    """The same place, under one name from whichever folder it was named; links in it stay where that is the same."""
    if ".." not in path.parts:
        return path
    written = os.path.normpath(path)
    real = os.path.realpath(path)
    # What is above a link is not what is above its target.
    return Path(written if os.path.realpath(written) == real else real)
