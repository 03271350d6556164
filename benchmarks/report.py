"""What every benchmark says about itself: where it ran, on which commit, and its figures as one JSON line."""

import json
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def environment() -> dict[str, Any]:
    """The hardware, the versions and the commit (with `-dirty` when the tree has changes)."""
    return {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": _git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"),
    }


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} × {names[0]}" if names else platform.processor() or platform.machine()


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    # A machine that is lent with a GPU may have none, and a figure is not to be lost for that.
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most of repeated measurements."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def quantile(values: Sequence[float], part: float) -> float:
    """Between the two values around it; never outside of what was measured, however few there are."""
    ordered, place = sorted(values), part * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def milliseconds(seconds: Sequence[float]) -> dict[str, float]:
    """Median, p95, p99 where there are enough values for it to differ from the most, and the most."""
    parts = {"median": 0.5, "p95": 0.95} | ({"p99": 0.99} if len(seconds) >= 100 else {})
    named = {name: quantile(seconds, part) for name, part in parts.items()} | {"max": max(seconds)}
    return {name: round(1e3 * value, 3) for name, value in named.items()}


def print_result(benchmark: str, figures: dict[str, Any], file: Path | None = None) -> None:
    """The benchmark's last line, written to `file` as well."""
    result = {"benchmark": benchmark, **environment(), **figures}
    if file is not None:
        file.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(json.dumps(result))
