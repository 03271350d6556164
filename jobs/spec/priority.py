"""How early a job is begun."""

from numbers import Integral
from typing import Any

from ...engine.errors import shown
from ...storage.errors import Argument
from ..errors import SpecError

MAX_PRIORITY = 1000


def checked_priority(priority: Any) -> int:
    """A priority that a ledger can put in order. Raises `SpecError`."""
    is_whole = isinstance(priority, Integral) and not isinstance(priority, bool)
    if is_whole and abs(priority) <= MAX_PRIORITY:
        return int(priority)
    problem = f" must be a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}, not {shown(priority)}"
    raise SpecError(Argument("priority"), problem, field="priority")
