"""The table that `gpu.py` prints, and the time that it has."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

BUDGET_SECONDS = 8 * 60


@dataclass
class Table:
    """The lines so far, each printed as it comes, and the goals that were not measured, with the reason."""

    lines: list[Any] = field(default_factory=list)
    not_run: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds_left(self) -> float:
        return BUDGET_SECONDS - (time.monotonic() - self.started)

    def add(self, *lines: Any) -> None:
        for line in lines:
            ratio = "" if line.ratio is None else f"{line.ratio:8.3f}"
            goal = "" if line.goal is None else f"  goal {line.number}: {line.goal:g}"
            print(f"{line.name:<66}{line.value:>12.3f} {line.unit:<9}{ratio}{goal}", flush=True)
        self.lines += lines

    def leave_out(self, goal: str, reason: str) -> None:
        print(f"not run: {goal}: {reason}", flush=True)
        self.not_run.append(f"{goal}: {reason}")

    def attempt(self, goal: str, needed_seconds: float, measure: Callable[[], None]) -> None:
        """Measure, unless there is no time left for it; what fails is left out, and what comes after it is measured."""
        if self.seconds_left < needed_seconds:
            left = max(0.0, self.seconds_left)
            self.leave_out(goal, f"{left:.0f} s were left, and it takes about {needed_seconds:.0f}")
            return
        try:
            measure()
        # One missing figure is not to cost the others, on a machine that is lent for minutes.
        except Exception as error:  # noqa: BLE001
            self.leave_out(goal, " ".join(f"{type(error).__name__}: {error}".split())[:300])
