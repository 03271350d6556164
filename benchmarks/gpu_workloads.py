"""The engine's goals for `gpu.py`, one after the other: end to end, the host's time, FP8, and the peers."""

from dataclasses import dataclass
from importlib.metadata import version
from statistics import median

import torch
from gpu_ceilings import least_seconds
from gpu_engine import CONFIGS, Workload, config_folder, load_for, output_rates
from gpu_kernels import Limits
from gpu_peers import PeerSeconds, peer_rate
from gpu_steps import SPARE_TOKENS, StepProfile, step_times
from gpu_table import Line, Table

from headrace.engine.llm import LLM

# For each of two workloads.
PEER_SECONDS = PeerSeconds(warm_up=10, timed=20, whole=75)
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
    rounds: how often a workload is timed, with other tokens each time.
    """

    small: str
    large: str
    uniform: str
    shared: tuple[int, int, int, int]
    labels: tuple[int, int, int, int]
    lengths: tuple[int, int, int]
    steps: int
    rounds: int


GPU = EngineSizes(
    "M2", "llama-3-8b", "qwen3-0.6b", (256, 2048, 128, 128), (1024, 2048, 128, 8), (256, 100, 1024), steps=60, rounds=3
)
DRY = EngineSizes("gate", "gate", "gate", (3, 32, 8, 3), (3, 32, 8, 2), (3, 3, 6), steps=4, rounds=1)


class EngineGoals:
    """What the engine does on the workloads, goal by goal; its rates are facts, to compare others with."""

    def __init__(self, table: Table, sizes: EngineSizes, device: torch.device, limits: Limits) -> None:
        self._table, self._sizes, self._device, self._limits = table, sizes, device, limits

    def small(self) -> None:
        sizes = self._sizes
        decodes = self._decodes(sizes.small)
        llm = self._end_to_end(sizes.small, decodes)
        rate = self._rate(sizes.small)
        name = f"{sizes.small}, {_SHARED}: of {_MIN_RATE:g} tokens/s"
        self._table.add(Line(name, rate, "tok/s", rate / _MIN_RATE, 1.0, 5, _MIN_RATE))
        self._steps(sizes.small, llm, decodes, is_goal=True)

    def large(self) -> None:
        decodes = self._decodes(self._sizes.large)
        llm = self._end_to_end(self._sizes.large, decodes)
        self._steps(self._sizes.large, llm, decodes, is_goal=False)

    def fp8(self) -> None:
        """FP8 weights and, on a GPU, an FP8 KV cache."""
        model = self._sizes.large
        work, decodes = Workload.shared(model, *self._sizes.shared), self._decodes(model)
        llm = self._load_fp8(work, decodes)
        rate, spread = self._measure(llm, work)
        plain = self._rate(model)
        name = f"{model} in FP8, {_SHARED}: times as fast as bfloat16"
        self._table.add(Line(name, rate, "tok/s", rate / plain, 1.5, 7, spread=spread))
        self._steps(f"{model} in FP8", llm, decodes, is_goal=False)

    def uniform(self) -> None:
        model = self._sizes.uniform
        work = Workload.uniform(model, *self._sizes.lengths)
        rate, spread = self._measure(load_for(model, self._device, [work]), work)
        self._keep_rate(_UNIFORM, rate)
        self._table.add(Line(f"{model}, {_UNIFORM}", rate, "tok/s", spread=spread))

    def peer(self, name: str) -> None:
        """An engine that is installed here, on both workloads. Raises `PeerError`."""
        for kind in (_SHARED, _UNIFORM):
            self._compare(name, kind)

    def profile(self, model: str) -> None:
        """What the kernels of a decode step of the shared workload take: `small`, `large` or `fp8`; or of the small
        model's labels those of the steps with prompts: `prompts`.
        """
        sizes = self._sizes
        if model == "prompts":
            self._profile_prompts()
            return
        decodes = self._decodes(sizes.small if model == "small" else sizes.large)
        is_fp8 = model == "fp8"
        llm = self._load_fp8(decodes) if is_fp8 else load_for(getattr(sizes, model), self._device, [decodes])
        # Compiles kernels and captures graphs.
        step_times(llm, decodes.with_other_tokens().prompts, 4)
        self._table.add(*self._steps(model, llm, decodes, is_goal=False).lines())

    def _profile_prompts(self) -> None:
        work = Workload.shared(self._sizes.small, *self._sizes.labels)
        llm = load_for(self._sizes.small, self._device, [work])
        for tokens in (work.with_other_tokens(), work):
            profiled = StepProfile.of_prompts(llm, tokens.prompts, tokens.max_tokens[0])
        # The first time kernels are compiled and graphs captured.
        self._table.add(*profiled.lines())

    def _decodes(self, model: str) -> Workload:
        """The shared workload with tokens out for all steps that are looked at."""
        requests, shared, own, _ = self._sizes.shared
        return Workload.shared(model, requests, shared, own, self._sizes.steps + SPARE_TOKENS, seed=3)

    def _load_fp8(self, *workloads: Workload) -> LLM:
        options = {"kv_cache_dtype": "fp8"} if self._device.type == "cuda" else {}
        llm: LLM = load_for(f"{self._sizes.large} fp8", self._device, workloads, **options)
        return llm

    def _steps(self, name: str, llm: LLM, work: Workload, is_goal: bool) -> StepProfile:
        """The host's time and the device's idle time while all of `work` is decoded.

        To be the last that a process does: once it was profiled, CUPTI may go on to take time.
        """
        name = f"{name}, a step of {len(work.prompts)} decodes"
        times = step_times(llm, work.prompts, self._sizes.steps)
        whole, host = times.step, times.host
        self._table.add(Line(f"{name}: whole", whole.median * 1e6, "us", spread=whole.spread))
        microseconds, title = host.median * 1e6, f"{name}: host, at most {_MAX_HOST_MICROSECONDS:g}"
        share, goal = microseconds / _MAX_HOST_MICROSECONDS, (1.0, 5, _MAX_HOST_MICROSECONDS) if is_goal else ()
        self._table.add(Line(title, microseconds, "us", share, *goal, spread=host.spread))
        idle = StepProfile.of(llm, work.prompts, self._sizes.steps)
        goal = (1.0, 5, _MAX_IDLE) if is_goal else ()
        title = f"{name}: idle, at most {_MAX_IDLE:g}"
        self._table.add(
            Line(title, idle.waiting_share, "share", idle.waiting_share / _MAX_IDLE, *goal),
            Line(f"{name}: idle or between kernels", idle.idle_share, "share"),
        )
        return idle

    def _end_to_end(self, model: str, *others: Workload) -> LLM:
        """The model, with room for `others` as well."""
        shared, labels = (Workload.shared(model, *size) for size in (self._sizes.shared, self._sizes.labels))
        llm: LLM = load_for(model, self._device, [shared, labels, *others])
        for work, name, size, goal in (
            (shared, _SHARED, self._sizes.shared, 0.65),
            (labels, "labels", self._sizes.labels, 0.7),
        ):
            rate, spread = self._measure(llm, work)
            if work is shared:
                self._keep_rate(model, rate)
            ceiling = work.num_output_tokens / least_seconds(CONFIGS[model], *size, self._limits)
            title = f"{model}, {name}: fraction of the ceiling"
            self._table.add(Line(title, rate, "tok/s", rate / ceiling, goal, 4, ceiling, spread))
        return llm

    def _measure(self, llm: LLM, work: Workload) -> tuple[float, float]:
        """Output tokens per second, and how far apart the rounds were as a share of that."""
        rates = output_rates(llm, work, self._sizes.rounds)
        return median(rates), (max(rates) - min(rates)) / median(rates)

    def _compare(self, peer: str, kind: str) -> None:
        sizes = self._sizes
        model = sizes.small if kind == _SHARED else sizes.uniform
        ours = self._rate(model if kind == _SHARED else kind)
        work = Workload.shared(model, *sizes.shared) if kind == _SHARED else Workload.uniform(model, *sizes.lengths)
        theirs = peer_rate(peer, config_folder(model), work, self._device.type, PEER_SECONDS)
        rate, goal = theirs.tokens_per_second, _PEER_GOALS[kind] if peer == "transformers" else None
        least = ", at least (it was not done in its time)" if theirs.is_most else ""
        title = f"{model}, {kind}: times as fast as {peer} {version(peer)}{least}"
        self._table.add(Line(title, rate, "tok/s", ours / rate, goal, 6))

    def _keep_rate(self, name: str, rate: float) -> None:
        self._table.state("rates", {**(self._table.fact("rates") or {}), name: rate})

    def _rate(self, name: str) -> float:
        """Our own tokens per second. Raises `LookupError`."""
        rate = (self._table.fact("rates") or {}).get(name)
        if rate is None:
            raise LookupError(f"there is no figure of our own of {name} to compare with: run its part first")
        return float(rate)
