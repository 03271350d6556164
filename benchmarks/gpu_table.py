"""What `gpu.py` has measured: printed line by line, and in a file that holds all of it at any time."""

import json
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpu_device import about_device, clocks


@dataclass(frozen=True)
class Line:
    """A row of the table: a figure, its unit, its fraction of a limit or ratio to a rival, and the goal for that.

    number: which of the project's goals it is about. limit: what the figure could be at best, in its unit. spread: how
    far apart nine tenths of its measurements were, as a share of the figure, which is their median.
    """

    name: str
    value: float
    unit: str
    ratio: float | None = None
    goal: float | None = None
    number: int | None = None
    limit: float | None = None
    spread: float | None = None

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f"{self.ratio:8.3f}"
        goal = "" if self.goal is None else f"  goal {self.number}: {self.goal:g}"
        spread = "" if self.spread is None else f"  ±{self.spread / 2:.1%}"
        return f"{self.name:<66}{self.value:>12.3f} {self.unit:<9}{ratio}{goal}{spread}"


class Table:
    """The parts that were run, by name: each has its lines, the seconds it took, and why it failed if it did.

    With a `file` that is there already its content is gone on with: a part that is run again replaces what it said
    before. The file is replaced as a whole after each line, so that it is right whenever the process ends.
    """

    def __init__(self, file: Path | None, about: dict[str, Any]) -> None:
        self._file, self._part = file, ""
        self._content: dict[str, Any] = {"benchmark": "gpu", **about, **about_device(), "facts": {}, "parts": {}}
        self.reread()

    @property
    def about(self) -> dict[str, Any]:
        """Where and with what it was measured."""
        return {name: value for name, value in self._content.items() if name not in ("facts", "parts")}

    @property
    def content(self) -> dict[str, Any]:
        return self._content

    def reread(self) -> None:
        """Take in what another process has written."""
        if self._file is not None and self._file.exists():
            held = json.loads(self._file.read_text(encoding="utf-8"))
            # Figures of another GPU or commit are not to stand beside these.
            if all(held.get(name) == self._content[name] for name in ("benchmark", "gpu", "commit")):
                self._content |= {name: held[name] for name in ("facts", "parts")}

    def fact(self, name: str) -> Any:
        """What an earlier part found out; None where that was not run."""
        return self._content["facts"].get(name)

    def state(self, name: str, value: Any) -> None:
        """Keep what later parts are to know, in other processes too."""
        self._content["facts"][name] = value
        self._write()

    def add(self, *lines: Line) -> None:
        for line in lines:
            self._content["parts"][self._part]["lines"].append(asdict(line))
            self._write()
            print(line, flush=True)

    def run(self, part: str, measure: Callable[[], None]) -> None:
        """Measure a part; what fails is said and kept, since one missing figure is not to cost the others."""
        self._part, started = part, time.monotonic()
        self._content["parts"][part] = {"lines": []}
        try:
            measure()
        except Exception as error:  # noqa: BLE001
            traceback.print_exc()
            self.fail(part, " ".join(f"{type(error).__name__}: {error}".split())[:600])
            if isinstance(error, AssertionError):
                self._content["parts"][part]["wrong"] = True
        self._content["parts"][part] |= {"seconds": round(time.monotonic() - started, 1), "clocks": clocks()}
        self._write()

    def fail(self, part: str, reason: str) -> None:
        """Say why a part has no more lines than it has."""
        print(f"{part}: {reason}", flush=True)
        self._content["parts"].setdefault(part, {"lines": []})["failure"] = reason
        self._write()

    def leave_out(self, part: str, reason: str) -> None:
        """As `fail`, of a part that was not begun: what an earlier run has measured of it stands."""
        if part in self._content["parts"]:
            print(f"{part}: {reason}", flush=True)
        else:
            self.fail(part, reason)

    @property
    def failures(self) -> dict[str, str]:
        return {name: part["failure"] for name, part in self._content["parts"].items() if "failure" in part}

    @property
    def wrong(self) -> set[str]:
        """The parts in which something that was computed is not what it has to be."""
        return {name for name, part in self._content["parts"].items() if part.get("wrong")}

    def _write(self) -> None:
        if self._file is not None:
            beside = self._file.with_name(self._file.name + ".new")
            beside.write_text(json.dumps(self._content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            os.replace(beside, self._file)
