"""A job's deadline: how it is written, and what becomes of the rows it overtakes."""

import re

import pyarrow as pa

from ..errors import SpecError
from .isolation import condemned

EXPIRED = "expired: no worker had begun this row by the job's deadline"

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
    return condemned(spooled, EXPIRED)
