"""Paths as users write them. Free of torch."""

from pathlib import Path


def absolute_path(path: str | Path) -> Path:
    """With the home folder that a ~ stands for. Raises `ValueError` where it stands for none."""
    try:
        return Path(path).expanduser().absolute()
    except RuntimeError as error:
        name = Path(path).parts[0]
        whose = f"there is no user {name.removeprefix('~')} here" if name != "~" else "this user has no home folder"
        raise ValueError(f"{path} begins with {name}, and {whose}: write the path out") from error
