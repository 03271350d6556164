"""Fields of a `quantization_config` that several of its formats have. Free of torch."""

import re
from collections.abc import Iterable
from typing import Any

from ..errors import ModelError
from .model_folder import Raw


def require(raw: Raw, field: str, *allowed: object, default: object = None, within: str = "") -> None:
    """within: where `raw` stands."""
    if (value := raw.get(field, default)) not in allowed:
        raise ModelError(f"{within}{field} is {value!r}; supported: {', '.join(map(str, allowed))}")


def read_block(field: str, sizes: Iterable[Any]) -> tuple[int, int]:
    """Of how many outputs and inputs each scale is."""
    rows, columns = map(int, sizes)
    if min(rows, columns) < 1:
        raise ModelError(f"{field} makes blocks of {rows} by {columns}: both must be at least 1")
    return rows, columns


def read_group_size(value: Any) -> int | None:
    """-1 stands for all inputs. Smaller groups than 32 inputs, or such that cross its multiples, have no kernel."""
    size = int(value)
    if size == -1:
        return None
    if size < 1 or size % 32:
        raise ModelError(f"group_size is {size}; supported: multiples of 32, or -1")
    return size


def inside(name: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?{re.escape(name.strip('.'))}(\..*)?$")


def names_in(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise TypeError(f"{value!r} is no list of names")
    return value
