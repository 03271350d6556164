"""Engines as processes of their own: started, given work, and asked what it took."""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from threading import Event, Timer
from types import TracebackType
from typing import Any, Self

from report import ROOT
from workloads import Workload

from headrace.engine.config import EngineConfig

ADAPTERS = ROOT / "benchmarks" / "peers"
VENVS = ROOT / "out" / "peers"
LOGS = ROOT / "out" / "bench"

OURS = "headrace"
# Each peer's module, by which it is found installed.
PEERS = {
    "vllm": "vllm",
    "openvino": "openvino_genai",
    "llamacpp": "llama_cpp",
    "ctranslate2": "ctranslate2",
    "transformers": "transformers",
}
PRECISIONS = ("float32", "bfloat16", "int8")


class EngineFailure(RuntimeError):
    """An engine's process ended, hung or answered nonsense; the message names its log."""


class CannotRun(Exception):
    """The engine has no way to do this work, and says why."""


@dataclass(frozen=True)
class Contender:
    """One engine at one precision."""

    engine: str
    precision: str

    def __str__(self) -> str:
        return f"{self.engine} {self.precision}"


@dataclass(frozen=True)
class Loaded:
    """`precision` in the engine's own words. `start_seconds`: from the process's start until it takes work."""

    version: str
    precision: str
    start_seconds: float


@dataclass(frozen=True)
class Reply:
    """`tokens`: the new token ids of each row."""

    seconds: float
    tokens: list[list[int]]


class EngineProcess:
    """One engine with one model loaded. An answer that takes `timeout_seconds` ends it."""

    def __init__(self, contender: Contender, checkpoint: Path, max_model_len: int, timeout_seconds: float) -> None:
        LOGS.mkdir(parents=True, exist_ok=True)
        self.contender = contender
        self.peak_rss_bytes = 0
        self._timeout_seconds = timeout_seconds
        self._log = LOGS / f"{contender.engine}-{contender.precision}.log"
        with self._log.open("w") as log:
            model = converted(contender, checkpoint, log, self._log)
            start = time.perf_counter()
            self._process = subprocess.Popen(
                [python_of(contender.engine), str(ADAPTERS / f"run_{contender.engine}.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment(),
            )
        reply = self._ask({"model": str(model), "precision": contender.precision, "max_model_len": max_model_len})
        self.loaded = Loaded(reply["version"], reply["precision"], time.perf_counter() - start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, workload: Workload) -> Reply:
        """Raises `CannotRun`, and `EngineFailure` when there is no sound answer."""
        request = {
            "prompts": workload.prompts,
            "max_tokens": workload.max_tokens,
            "shared_tokens": workload.shared_tokens,
        }
        reply = self._ask(request)
        if "cannot_run" in reply:
            raise CannotRun(reply["cannot_run"])
        if [len(tokens) for tokens in reply["tokens"]] != workload.max_tokens:
            raise EngineFailure(f"{self.contender} did not generate as many tokens as were asked for")
        return Reply(reply["seconds"], reply["tokens"])

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timed_out = Event()
        timer = Timer(self._timeout_seconds, self._end, [timed_out])
        timer.start()
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            how = (
                f"gave no answer in {self._timeout_seconds:.0f} s"
                if timed_out.is_set()
                else f"ended with status {self._process.wait()}"
            )
            raise EngineFailure(f"{self.contender} {how}: see {self._log}")
        reply: dict[str, Any] = json.loads(line)
        self.peak_rss_bytes = reply["peak_rss_bytes"]
        return reply

    def _end(self, timed_out: Event) -> None:
        timed_out.set()
        self._process.kill()


def converted(contender: Contender, checkpoint: Path, log: Any, log_file: Path) -> Path:
    """The model as the engine reads it: the checkpoint, or what `peers/convert_<engine>.py` made of it, once."""
    script = ADAPTERS / f"convert_{contender.engine}.py"
    if not script.is_file():
        return checkpoint
    folder = checkpoint / f"{contender.engine}-{contender.precision}"
    newest = max((checkpoint / "model.safetensors").stat().st_mtime, script.stat().st_mtime)
    if folder.is_dir() and folder.stat().st_mtime >= newest:
        return folder
    partial = folder.with_name(f"{folder.name}.tmp")
    for stale in (partial, folder):
        shutil.rmtree(stale, ignore_errors=True)
    command = [python_of(contender.engine), str(script), str(checkpoint), contender.precision, str(partial)]
    done = subprocess.run(command, stdout=log, stderr=log, env=environment(), check=False)
    if done.returncode:
        raise EngineFailure(f"{contender} cannot convert the checkpoint: see {log_file}")
    # Renamed when complete: an interrupted conversion leaves no folder that looks whole.
    partial.rename(folder)
    return folder


def environment() -> dict[str, str]:
    return os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def precisions_of(engine: str) -> tuple[str, ...]:
    """Those of `PRECISIONS` that an engine computes in."""
    match engine:
        case "vllm" | "openvino" | "llamacpp":
            return PRECISIONS
        case "ctranslate2":
            return ("float32", "int8")
        case "headrace" if "quantization" in signature(EngineConfig).parameters:
            return PRECISIONS
        case _:
            return ("float32", "bfloat16")


def python_of(engine: str) -> str:
    """A peer runs in the virtual environment that `peers/install.sh` made for it, else in this one."""
    own = VENVS / engine / "bin" / "python"
    return str(own) if own.is_file() else sys.executable


def is_installed(engine: str) -> bool:
    """Whether the peer's module is found where the peer would run."""
    find = f"import sys, importlib.util as u; sys.exit(u.find_spec({PEERS[engine]!r}) is None)"
    return subprocess.run([python_of(engine), "-c", find], cwd="/", check=False).returncode == 0
