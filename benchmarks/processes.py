"""Engines as processes of their own: started, given work, and asked what it took."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from report import ROOT
from workloads import Workload

ADAPTERS = ROOT / "benchmarks" / "peers"
VENVS = ROOT / "out" / "peers"
LOGS = ROOT / "out" / "bench"
PEERS = ("transformers", "vllm")


class EngineFailure(RuntimeError):
    """An engine's process ended instead of answering; the message names its log."""


@dataclass(frozen=True)
class Reply:
    """`tokens`: the new token ids of each row; empty for the reply to loading."""

    seconds: float
    peak_rss_bytes: int
    version: str
    tokens: list[list[int]]


class EngineProcess:
    """One engine with one model loaded."""

    def __init__(self, engine: str, model: Path, dtype: str, max_model_len: int) -> None:
        LOGS.mkdir(parents=True, exist_ok=True)
        self.engine = engine
        self._log = LOGS / f"{engine}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [python_of(engine), str(ADAPTERS / f"run_{engine}.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            )
        self.loaded = self._ask({"model": str(model), "dtype": dtype, "max_model_len": max_model_len})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, workload: Workload) -> Reply:
        request = {
            "prompts": workload.prompts,
            "max_tokens": workload.max_tokens,
            "shared_tokens": workload.shared_tokens,
        }
        reply = self._ask(request)
        lengths = [len(tokens) for tokens in reply.tokens]
        if lengths != workload.max_tokens:
            raise EngineFailure(f"{self.engine} did not generate as many tokens as were asked for")
        return reply

    def _ask(self, request: dict[str, Any]) -> Reply:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
        except BrokenPipeError as error:
            raise EngineFailure(f"{self.engine} ended: see {self._log}") from error
        line = self._process.stdout.readline()
        if not line:
            raise EngineFailure(f"{self.engine} ended: see {self._log}")
        reply = json.loads(line)
        return Reply(reply["seconds"], reply["peak_rss_bytes"], reply.get("version", ""), reply.get("tokens", []))


def python_of(engine: str) -> str:
    """A peer runs in the virtual environment that `peers/install.sh` made for it, else in this one."""
    own = VENVS / engine / "bin" / "python"
    return str(own) if own.is_file() else sys.executable


def is_installed(engine: str) -> bool:
    """Whether the engine's package is found where the engine would run."""
    find = f"import sys, importlib.util as u; sys.exit(u.find_spec({engine!r}) is None)"
    return subprocess.run([python_of(engine), "-c", find], cwd="/", check=False).returncode == 0
