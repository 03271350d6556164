"""Fields of a JSON object, each refused by its name where it is something else than is wanted. Free of torch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ModelError, shown

Object = Mapping[str, Any]

_MOST = 10_000


def whole(raw: Object, name: str, default: int | None = None, *, within: str = "") -> int:
    """A whole number; `default` counts where it is left out. `within`: where `raw` stands, for errors.

    Raises `KeyError` where it is left out and there is no default.
    """
    value = _given(raw, name, default, within)
    if not _is_number(value) or value != int(value):
        raise ModelError(f"{within}{name} must be a whole number, not {shown(value)}")
    return int(value)


def positive(raw: Object, name: str, default: int | None = None, *, within: str = "") -> int:
    """A whole number that is at least 1; see `whole`."""
    if (size := whole(raw, name, default, within=within)) < 1:
        raise ModelError(f"{within}{name} must be at least 1, not {size}")
    return size


def few(raw: Object, name: str, *, within: str = "") -> int:
    """How many there are of what is gone through one by one, as layers are: from 1 to 10,000; see `whole`."""
    if (number := positive(raw, name, within=within)) > _MOST:
        raise ModelError(f"{within}{name} must be at most {_MOST:,}, not {number}")
    return number


def number(raw: Object, name: str, default: float | None = None, *, within: str = "") -> float:
    """Any finite number; see `whole`."""
    value = _given(raw, name, default, within)
    if not _is_number(value):
        raise ModelError(f"{within}{name} must be a number, not {shown(value)}")
    return float(value)


def above_zero(raw: Object, name: str, default: float | None = None, *, within: str = "") -> float:
    """A number above 0; see `whole`."""
    if (found := number(raw, name, default, within=within)) <= 0:
        raise ModelError(f"{within}{name} must be above 0, not {found}")
    return found


def whole_or_none(raw: Object, name: str, *, within: str = "") -> int | None:
    """None where it is left out, or null, or false."""
    return None if _is_nothing(raw.get(name)) else whole(raw, name, within=within)


def number_or_none(raw: Object, name: str, *, within: str = "") -> float | None:
    """See `whole_or_none`."""
    return None if _is_nothing(raw.get(name)) else number(raw, name, within=within)


def wholes(raw: Object, name: str, default: Sequence[int] | None = None, *, within: str = "") -> tuple[int, ...]:
    """A list of whole numbers; see `whole`."""
    found = _listed(raw, name, default, within)
    return tuple(whole(found, each, within=within) for each in found)


def numbers(raw: Object, name: str, default: Sequence[float] | None = None, *, within: str = "") -> tuple[float, ...]:
    """See `wholes`."""
    found = _listed(raw, name, default, within)
    return tuple(number(found, each, within=within) for each in found)


def require(raw: Object, name: str, *allowed: object, within: str = "", is_needed: bool = False) -> None:
    """Refuse another value than these; where it is left out it is the first, unless it `is_needed`. See `whole`."""
    if (found := raw.get(name, None if is_needed else allowed[0])) not in allowed:
        raise ModelError(f"{within}{name} is {shown(found)}; supported: {', '.join(map(str, allowed))}")


def _listed(raw: Object, name: str, default: Sequence[float] | None, within: str) -> dict[str, Any]:
    """Each by its place."""
    found = _given(raw, name, default, within)
    if not isinstance(found, list | tuple):
        raise ModelError(f"{within}{name} must be a list of numbers, not {shown(found)}")
    return {f"{name}[{place}]": each for place, each in enumerate(found)}


def _given(raw: Object, name: str, default: Any, within: str) -> Any:
    if default is None and name not in raw:
        raise KeyError(f"{within}{name}")
    return raw.get(name, default)


def _is_number(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    return isinstance(value, int) and not isinstance(value, bool)


def _is_nothing(value: Any) -> bool:
    return value is None or value is False


class Section:
    """An object within another: `within` is what its fields' names begin with in errors. See the functions."""

    def __init__(self, raw: Object, within: str) -> None:
        self.raw = raw
        self.within = within

    def get(self, name: str, default: Any = None) -> Any:
        """Of any kind."""
        return self.raw.get(name, default)

    def section(self, name: str) -> "Section":
        """What stands below this one; nothing where it is left out."""
        return Section(self.raw.get(name) or {}, f"{self.within}{name}.")

    def whole(self, name: str, default: int | None = None) -> int:
        return whole(self.raw, name, default, within=self.within)

    def positive(self, name: str, default: int | None = None) -> int:
        return positive(self.raw, name, default, within=self.within)

    def number(self, name: str, default: float | None = None) -> float:
        return number(self.raw, name, default, within=self.within)

    def above_zero(self, name: str, default: float | None = None) -> float:
        return above_zero(self.raw, name, default, within=self.within)

    def whole_or_none(self, name: str) -> int | None:
        return whole_or_none(self.raw, name, within=self.within)

    def number_or_none(self, name: str) -> float | None:
        return number_or_none(self.raw, name, within=self.within)

    def wholes(self, name: str, default: Sequence[int] | None = None) -> tuple[int, ...]:
        return wholes(self.raw, name, default, within=self.within)

    def numbers(self, name: str, default: Sequence[float] | None = None) -> tuple[float, ...]:
        return numbers(self.raw, name, default, within=self.within)

    def require(self, name: str, *allowed: object) -> None:
        require(self.raw, name, *allowed, within=self.within)
