"""Fields of a `quantization_config` that several of its formats have. Free of torch."""

from typing import Any

from ..errors import ModelError, shown
from .scalars import whole, wholes


def read_block(field: str, sizes: Any) -> tuple[int, int]:
    """Of how many outputs and inputs each scale is."""
    if len(found := wholes({field: sizes}, field)) != 2:
        raise ModelError(f"{field} must be a number of outputs and one of inputs, not {shown(sizes)}")
    rows, columns = found
    if min(rows, columns) < 1:
        raise ModelError(f"{field} makes blocks of {rows} by {columns}: both must be at least 1")
    return rows, columns


def read_group_size(value: Any) -> int | None:
    """-1 stands for all inputs. Smaller groups than 32 inputs, or such that cross its multiples, have no kernel."""
    size = whole({"group_size": value}, "group_size")
    if size == -1:
        return None
    if size < 1 or size % 32:
        raise ModelError(f"group_size is {size}; supported: multiples of 32, or -1")
    return size


def names_in(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise TypeError(f"{value!r} is no list of names")
    return value
