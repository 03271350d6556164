"""How stored answers were computed, where it is not how they are now: the first place to look when they differ."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# An answer's own, which are no circumstances.
_OWN = ("seed", "attempt")


@dataclass(frozen=True)
class Change:
    """What the receipts of so many stored rows say of `name`, and those of the rows made again."""

    name: str
    stored: str | None
    now: str | None
    num_rows: int

    def __str__(self) -> str:
        rows = f"{self.num_rows} row{'' if self.num_rows == 1 else 's'}"
        return f"{self.name} was {self.stored} for {rows}, is {self.now}"


def changes(pairs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> tuple[Change, ...]:
    """Compare the receipts of rows, each with the same made again; rows of before there were receipts say nothing."""
    found = Counter[tuple[str, str | None, str | None]]()
    for stored, again in pairs:
        before, now = stored.get("receipt"), again.get("receipt")
        if before is not None and now is not None:
            names = [name for name in now if name not in _OWN and before.get(name) != now[name]]
            found.update((name, before.get(name), now[name]) for name in names)
    return tuple(Change(*change, num_rows) for change, num_rows in found.items())
