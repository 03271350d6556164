"""What fields of several descriptions are held to."""

from typing import Any, TypeVar

from pydantic_core import PydanticCustomError

Texts = TypeVar("Texts", str, None, tuple[str, ...])


def number(value: Any) -> Any:
    """Python counts true and false among the numbers, as pydantic does numpy's; here they are a mistake.

    What no tensor holds is none either.
    """
    if isinstance(value, bool) or getattr(value, "dtype", None) == "bool":
        raise PydanticCustomError("number", "Input should be a number, not {value}", {"value": str(value).lower()})
    if isinstance(value, int) and value >= 2**64:
        raise PydanticCustomError("number", "Input should be below 2**64")
    return value


def storable(value: Texts) -> Texts:
    """Refuse what a shell may pass through but nothing can store: bytes that are no UTF-8."""
    try:
        "".join(value or ()).encode()
    except UnicodeEncodeError as error:
        raise ValueError("is not valid UTF-8") from error
    return value
