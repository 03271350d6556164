"""How early a job is begun."""

from typing import Any

from ...storage.errors import Argument
from ..errors import SpecError

MAX_PRIORITY = 1000


def checked_priority(priority: Any) -> int:
    """A priority that a ledger can put in order. Raises `SpecError`."""
    if isinstance(priority, int) and abs(priority) <= MAX_PRIORITY:
        return priority
    problem = f" must be a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}, not {priority!r}"
    raise SpecError(Argument("priority"), problem, field="priority")
