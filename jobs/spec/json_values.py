"""Values that users pass and that are kept as JSON, and what references in their JSON schemas name."""

import json
from collections.abc import Mapping
from typing import Any


def json_problem(value: Any) -> str | None:
    """What JSON cannot say of a value, as the end of a sentence about it; None if it can be kept."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        return f"can only have what JSON has: {error}"
    return None


def in_order(value: Any) -> Any:
    """The value, unless its order differs from run to run: raises `ValueError`, for pydantic."""
    if isinstance(value, set | frozenset):
        raise ValueError("must be a list, as a set has no order")
    return value


def referred(root: Any, reference: str) -> Any:
    """What a schema's `$ref`, `#/…`, names in the document; None where it names nothing."""
    path = reference.removeprefix("#").removeprefix("/")
    for part in path.split("/") if path else ():
        root = root.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(root, Mapping) else None
    return root
