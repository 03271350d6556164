"""The engine's goals for `gpu.py`, one after the other: end to end, the host's time, FP8, and the peers."""

from dataclasses import dataclass
from functools import partial
from importlib.metadata import version

import torch
from gpu_ceilings import least_seconds
from gpu_engine import CONFIGS, Workload, config_folder, load_for, output_rate, release_memory
from gpu_kernels import Limits, Line
from gpu_peers import PEERS, PeerError, peer_rate
from gpu_steps import idle_shares, step_times
from gpu_table import Table

from headrace.engine.llm import LLM

# What a peer may take for one workload, its start and warm-up included.
_PEER_SECONDS = 120.0
_MIN_RATE = 120_000.0
_MAX_HOST_MICROSECONDS = 150.0
_MAX_IDLE = 0.03
_SHARED, _UNIFORM = "shared prompt", "uniform lengths"
# How many times as fast as transformers.
_PEER_GOALS = {_SHARED: 10.0, _UNIFORM: 2.0}


@dataclass(frozen=True)
class EngineSizes:
    """How large the workloads are: requests, shared and own tokens of a prompt, tokens out.

    lengths: requests, and the least and the most tokens of a prompt and an answer. steps: decode steps that are timed.
    """

    small: str
    large: str
    uniform: str
    shared: tuple[int, int, int, int]
    labels: tuple[int, int, int, int]
    lengths: tuple[int, int, int]
    steps: int


GPU = EngineSizes(
    "M2", "llama-3-8b", "qwen3-0.6b", (256, 2048, 128, 128), (1024, 2048, 128, 8), (256, 100, 1024), steps=60
)
DRY = EngineSizes("gate", "gate", "gate", (3, 32, 8, 3), (3, 32, 8, 2), (3, 3, 6), steps=4)


class EngineGoals:
    """Fills the table with what the engine does on the workloads; remembers its rates, to compare others with."""

    def __init__(self, table: Table, sizes: EngineSizes, device: torch.device, limits: Limits) -> None:
        self._table, self._sizes, self._device, self._limits = table, sizes, device, limits
        self._rates: dict[str, float] = {}

    def measure(self) -> None:
        """The engine alone, most wanted first."""
        table, sizes = self._table, self._sizes
        table.attempt(f"goals 4, 5 on {sizes.small}", 60, self._small)
        table.attempt(f"goal 4 on {sizes.large}", 60, self._large)
        table.attempt("goal 7", 60, self._fp8)
        table.attempt("goal 6, our side", 40, self._uniform)

    def compare(self, with_peers: bool) -> None:
        """Each peer that is installed on both workloads."""
        for peer in PEERS:
            for name, goal in _PEER_GOALS.items():
                title = f"goal 6, {peer}, {name}, {goal:g} times as fast"
                if with_peers:
                    self._table.attempt(title, 30, partial(self._peer, peer, name))
                else:
                    self._table.leave_out(title, "not asked for")

    def _small(self) -> None:
        sizes = self._sizes
        requests, shared, own, _ = sizes.shared
        decodes = Workload.shared(sizes.small, requests, shared, own, sizes.steps + 4, seed=3)
        llm = self._end_to_end(sizes.small, decodes)
        rate = self._rates[sizes.small]
        name = f"{sizes.small}, {_SHARED}: of {_MIN_RATE:g} tokens/s"
        self._table.add(Line(name, rate, "tok/s", rate / _MIN_RATE, 1.0, 5, _MIN_RATE))
        self._steps(llm, decodes)

    def _steps(self, llm: LLM, work: Workload) -> None:
        """The host's time and the device's idle time while all of `work` is decoded."""
        steps, name = self._sizes.steps, f"{self._sizes.small}, a step of {len(work.prompts)} decodes"
        times = step_times(llm, work.prompts, steps)
        idle = idle_shares(llm, work.prompts, steps)
        share = times.host / _MAX_HOST_MICROSECONDS
        self._table.add(
            Line(f"{name}: whole", times.step, "us"),
            Line(f"{name}: host, at most {_MAX_HOST_MICROSECONDS:g}", times.host, "us", share, 1.0, 5, 150.0),
            Line(f"{name}: idle, at most {_MAX_IDLE:g}", idle.waiting, "share", idle.waiting / _MAX_IDLE, 1.0, 5, 0.03),
            Line(f"{name}: idle or between kernels", idle.between, "share"),
        )

    def _large(self) -> None:
        self._end_to_end(self._sizes.large)

    def _end_to_end(self, model: str, *others: Workload) -> LLM:
        """The model, with room for `others` as well."""
        shared, labels = (Workload.shared(model, *size) for size in (self._sizes.shared, self._sizes.labels))
        llm: LLM = load_for(model, self._device, [shared, labels, *others])
        self._rates[model] = output_rate(llm, shared)
        self._add_end_to_end(f"{model}, {_SHARED}", self._rates[model], self._sizes.shared, 0.65, model)
        self._add_end_to_end(f"{model}, labels", output_rate(llm, labels), self._sizes.labels, 0.70, model)
        return llm

    def _add_end_to_end(self, name: str, rate: float, size: tuple[int, int, int, int], goal: float, model: str) -> None:
        ceiling = size[0] * size[3] / least_seconds(CONFIGS[model], *size, self._limits)
        self._table.add(Line(f"{name}: fraction of the ceiling", rate, "tok/s", rate / ceiling, goal, 4, ceiling))

    def _fp8(self) -> None:
        """FP8 weights and, on a GPU, an FP8 KV cache."""
        model = self._sizes.large
        work = Workload.shared(model, *self._sizes.shared)
        options = {"kv_cache_dtype": "fp8"} if self._device.type == "cuda" else {}
        rate = output_rate(load_for(f"{model} fp8", self._device, [work], **options), work)
        plain = self._rates.get(model)
        if plain is None:
            raise LookupError(f"there is no figure of {model} in bfloat16 to compare {rate:.0f} tok/s with")
        name = f"{model} in FP8, {_SHARED}: times as fast as bfloat16"
        self._table.add(Line(name, rate, "tok/s", rate / plain, 1.5, 7))

    def _uniform(self) -> None:
        model = self._sizes.uniform
        work = Workload.uniform(model, *self._sizes.lengths)
        self._rates[_UNIFORM] = output_rate(load_for(model, self._device, [work]), work)
        self._table.add(Line(f"{model}, {_UNIFORM}", self._rates[_UNIFORM], "tok/s"))

    def _peer(self, peer: str, name: str) -> None:
        sizes = self._sizes
        model = sizes.small if name == _SHARED else sizes.uniform
        ours = self._rates.get(model if name == _SHARED else name)
        if ours is None:
            raise PeerError("there is no figure of our own to compare with")
        work = Workload.shared(model, *sizes.shared) if name == _SHARED else Workload.uniform(model, *sizes.lengths)
        limit = min(_PEER_SECONDS, self._table.seconds_left)
        release_memory()
        theirs = peer_rate(peer, config_folder(model), work, self._device.type, limit)
        goal = _PEER_GOALS[name] if peer == "transformers" else None
        title = f"{model}, {name}: times as fast as {peer} {version(peer)}"
        self._table.add(Line(title, theirs, "tok/s", ours / theirs, goal, 6))
