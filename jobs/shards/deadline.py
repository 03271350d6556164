"""A job's deadline, and what is said of the rows it overtakes."""

import time
from dataclasses import dataclass
from typing import Self

from ...storage.ledger.records import Claim

EXPIRED = "expired: "
NOT_BEGUN = f"{EXPIRED}no worker had begun this row by the job's deadline"
NOT_ANSWERED = f"{EXPIRED}this row had no answer by the job's deadline"


@dataclass(frozen=True)
class Deadline:
    """A job's, by this process's clock. `at`: as `time.monotonic` counts; None where there is none."""

    at: float | None

    @classmethod
    def of(cls, claim: Claim) -> Self:
        """To be called when the claim was just made."""
        return cls(None if claim.seconds_left is None else time.monotonic() + claim.seconds_left)

    @property
    def has_passed(self) -> bool:
        return self.at is not None and time.monotonic() >= self.at

    def not_after(self, moment: float) -> float:
        """The moment, or the deadline if that is earlier."""
        return moment if self.at is None else min(moment, self.at)
