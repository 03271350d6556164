"""A job's deadline: how it is written, and what becomes of the rows it overtakes."""

import re
import time
from dataclasses import dataclass
from typing import Self

import pyarrow as pa

from ...storage.records import Claim
from ..errors import SpecError
from .isolation import condemned

NOT_BEGUN = "expired: no worker had begun this row by the job's deadline"
NOT_ANSWERED = "expired: this row had no answer by the job's deadline"

_DURATION = re.compile(r"(?P<count>\d+(\.\d+)?)(?P<unit>[smhd])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(option: str, text: str) -> float:
    """Seconds of `90s`, `45m`, `24h` or `7d`. Raises `SpecError`."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not float(match["count"]):
        raise SpecError(f"{option} must be a number and s, m, h or d, such as 24h, not {text!r}")
    return float(match["count"]) * _SECONDS[match["unit"]]


def expire(spooled: pa.Table) -> pa.Table:
    """A spooled shard none of whose rows is to reach the engine; what was wrong with a row before stays."""
    return condemned(spooled, NOT_BEGUN)


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
