"""How long, as users write it."""

import re

from ..errors import SpecError

_DURATION = re.compile(r"(?P<count>\d+(\.\d+)?)(?P<unit>[smhd])")
# Of a deadline, where a number says it.
MAX_WITHIN_SECONDS = 366 * 86400
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_duration(option: str, text: str) -> float:
    """Seconds of `90s`, `45m`, `24h` or `7d`. Raises `SpecError` naming the option."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not float(match["count"]):
        raise SpecError(f"{option} must be a number and s, m, h or d, such as 24h, not {text!r}")
    return float(match["count"]) * _SECONDS[match["unit"]]
