"""The GPU that `gpu.py` runs on, and how long calls take on it."""

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from report import ROOT, quantile
from triton_interpreter import hasten_interpreter, interpret_triton

# A few times what a GPU's level-2 cache holds.
_FLUSHED_BYTES = 256 * 2**20
# Calls that are timed together, where they are shorter than this.
_REPEATS, _SHORT_SECONDS = 4, 200e-6
# What cannot be told from nothing.
_LEAST_SECONDS = 1e-9
_CLOCKS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "clocks_event_reasons.active")


def prepare(is_dry: bool) -> None:
    """Before anything of headrace is imported: kernels are interpreted in a dry run. Exits where another has no GPU."""
    if is_dry:
        interpret_triton()
        hasten_interpreter()
    elif not torch.cuda.is_available():
        sys.exit("torch finds no CUDA GPU here; --dry-run runs the script on a CPU")
    if find_spec("headrace") is None:
        # Where the package is not installed: a folder of links that is called headrace.
        sys.path.append(str(ROOT / "typings"))


@dataclass(frozen=True)
class Timing:
    """Seconds of a call: the median, and between which two nine tenths of the repetitions were."""

    median: float
    low: float
    high: float

    @property
    def spread(self) -> float:
        return (self.high - self.low) / self.median

    @classmethod
    def of(cls, times: list[float]) -> "Timing":
        return cls(median(times), quantile(times, 0.05), quantile(times, 0.95))


def timing(call: Callable[[], object], device: torch.device, rounds: int, is_captured: bool = True) -> Timing:
    """How long a call takes.

    On a GPU it is made once to warm up, and then several times from a CUDA graph, as a model's layers are; what such a
    graph takes without it, its launch included, is taken off (3 microseconds on an H200). The GPU's cache holds none of
    what it reads, as in a model: there the other layers were between. `is_captured`: no where a graph has another way
    to do it, as it has for copies.
    """
    if device.type != "cuda":
        return Timing.of(list(_host_times(call, rounds)))
    call()
    torch.cuda.synchronize()
    others = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=device)

    def repeat(times: int, *calls: Callable[[], object]) -> list[float]:
        def all_calls() -> None:
            for each in calls * times:
                each()

        return list(_device_times(_captured(all_calls) if is_captured else all_calls, rounds))

    def measure(times: int) -> Timing:
        apart = median(repeat(times, others.zero_))
        return Timing.of([max(taken - apart, _LEAST_SECONDS) / times for taken in repeat(times, others.zero_, call)])

    once = measure(1)
    # Long ones are not repeated: a GPU that multiplies for long gets slower, as it may take only so much power.
    return measure(_REPEATS) if once.median < _SHORT_SECONDS else once


def timing_with_waits(call: Callable[[], object], device: torch.device, rounds: int) -> Timing:
    """As `timing`, of a call that waits for the GPU on its way, and so goes into no graph: by the host's clock.

    The GPU's cache is not flushed.
    """
    if device.type != "cuda":
        return timing(call, device, rounds)

    def finished() -> None:
        call()
        torch.cuda.synchronize()

    finished()
    return Timing.of(list(_host_times(finished, rounds)))


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _device_times(call: Callable[[], object], rounds: int) -> Iterator[float]:
    new_event: Callable[..., Any] = torch.cuda.Event
    # Twice more than are counted: the first uploads a graph.
    for number in range(rounds + 2):
        start, end = new_event(enable_timing=True), new_event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        if number >= 2:
            yield start.elapsed_time(end) / 1000


def _host_times(call: Callable[[], object], rounds: int) -> Iterator[float]:
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        yield time.perf_counter() - start


def about_device() -> dict[str, Any]:
    """What a figure depends on beside the program."""
    if not torch.cuda.is_available():
        return {"gpu": "none (dry run)", **_compiler()}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "processors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        "driver": (_nvidia_smi("driver_version") or ["unknown"])[0],
        **_compiler(),
    }


def _compiler() -> dict[str, str]:
    """The versions of what compiles the kernels; nothing of them is worth losing a figure for."""
    try:
        import triton

        # Which of its assemblers is taken is decided there.
        from headrace.kernels import triton_checks  # noqa: F401

        return {"triton": triton.__version__, "ptxas": triton.knobs.nvidia.ptxas.version}
    except (ImportError, AttributeError, RuntimeError):
        return {}


def results_name(gpu: str) -> str:
    """A results file's name: `h100-gpu.json` for an NVIDIA H100 80GB HBM3."""
    model = re.search(r"[A-Z]+\d+\w*", gpu)
    return f"{model[0].lower() if model else 'dry'}-gpu.json"


def clocks() -> dict[str, str]:
    """Clocks, temperature and power as they are, where something tells; nothing is changed about them."""
    if not torch.cuda.is_available():
        return {}
    if values := _nvidia_smi(",".join(_CLOCKS)):
        return dict(zip(_CLOCKS, values, strict=False))
    try:
        return {"clocks.sm": f"{torch.cuda.clock_rate()} MHz"}
    # It wants a package that the machine need not have, and a driver that answers.
    except Exception:  # noqa: BLE001
        return {}


def _nvidia_smi(query: str) -> list[str]:
    # Not on the path where only the driver's folder is mounted.
    for program in ("nvidia-smi", "/usr/local/nvidia/bin/nvidia-smi"):
        if "/" in program and not Path(program).exists():
            continue
        try:
            done = subprocess.run(
                [program, f"--query-gpu={query}", "--format=csv,noheader"],
                capture_output=True,
                text=True,
                timeout=10,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout.strip():
            return [value.strip() for value in done.stdout.splitlines()[0].split(",")]
    return []
