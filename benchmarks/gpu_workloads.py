"""The engine's goals for `gpu.py`, one after the other: end to end, the host's time, the peers, and FP8."""

from functools import partial

import torch
from gpu import EngineSizes, Table
from gpu_engine import Workload, config_folder, engine_line, load_for, output_rate
from gpu_kernels import Line
from gpu_peers import PEERS, PeerError, peer_rate
from gpu_steps import host_microseconds, idle_fraction

# What transformers may take for one workload.
_PEER_SECONDS = 75.0
_MIN_RATE = 120_000.0
_MAX_HOST_MICROSECONDS = 150.0
_MAX_IDLE = 0.03


def run_engine(table: Table, sizes: EngineSizes, device: torch.device, with_peers: bool) -> None:
    """Fill the table with what the engine does on the workloads, most wanted first."""
    rates: dict[str, float] = {}
    table.attempt("goal 5, host", 15, partial(_host, table, sizes, device))
    table.attempt(f"goals 4, 5 on {sizes.small}", 45, partial(_small, table, sizes, device, rates))
    table.attempt(f"goal 4 on {sizes.large}", 100, partial(_end_to_end, table, sizes, sizes.large, device, rates))
    table.attempt("goal 7", 75, partial(_fp8, table, sizes, device, rates))
    table.attempt("goal 6, our side", 30, partial(_uniform, table, sizes, device, rates))
    for peer in PEERS:
        if not with_peers:
            table.leave_out(f"goal 6, {peer}", "not asked for")
            continue
        for name in ("shared prompt", "uniform lengths"):
            table.attempt(f"goal 6, {peer}, {name}", 20, partial(_peer, table, sizes, device, rates, peer, name))


def _host(table: Table, sizes: EngineSizes, device: torch.device) -> None:
    took = host_microseconds(device, sizes.host_batch, sizes.steps)
    name = f"host, a step of {sizes.host_batch} decodes without a model: fraction of what it may take"
    table.add(Line(name, took, "us", took / _MAX_HOST_MICROSECONDS, 1.0, 5, _MAX_HOST_MICROSECONDS))


def _small(table: Table, sizes: EngineSizes, device: torch.device, rates: dict[str, float]) -> None:
    _end_to_end(table, sizes, sizes.small, device, rates)
    rate = rates[sizes.small]
    name = f"{sizes.small}, shared prompt: of {_MIN_RATE:g}"
    table.add(Line(name, rate, "tok/s", rate / _MIN_RATE, 1.0, 5, _MIN_RATE))
    work = Workload.shared(sizes.small, *sizes.shared[:3], sizes.steps + 4)
    llm = load_for(sizes.small, device, [work])
    idle = idle_fraction(llm, work.prompts, sizes.steps)
    name = f"{sizes.small}, device idle in steps of {len(work.prompts)} decodes: of {_MAX_IDLE:g}"
    table.add(Line(name, idle, "fraction", idle / _MAX_IDLE, 1.0, 5, _MAX_IDLE))


def _end_to_end(table: Table, sizes: EngineSizes, model: str, device: torch.device, rates: dict[str, float]) -> None:
    shared, labels = (Workload.shared(model, *size) for size in (sizes.shared, sizes.labels))
    llm = load_for(model, device, [shared, labels])
    tokens_ceiling, requests_ceiling = sizes.ceilings[model]
    rates[model] = output_rate(llm, shared)
    table.add(engine_line(f"{model}, shared prompt", rates[model], tokens_ceiling, 0.65, 4))
    ceiling = requests_ceiling * labels.max_tokens[0]
    table.add(engine_line(f"{model}, labels", output_rate(llm, labels), ceiling, 0.70, 4))


def _fp8(table: Table, sizes: EngineSizes, device: torch.device, rates: dict[str, float]) -> None:
    """FP8 weights and, on a GPU, an FP8 KV cache."""
    work = Workload.shared(sizes.large, *sizes.shared)
    options = {"kv_cache_dtype": "fp8"} if device.type == "cuda" else {}
    rate = output_rate(load_for(f"{sizes.large} fp8", device, [work], **options), work)
    plain = rates.get(sizes.large)
    if plain is None:
        raise LookupError(f"there is no figure of {sizes.large} in bfloat16 to compare {rate:.0f} tok/s with")
    name = f"{sizes.large} in FP8, shared prompt: times as fast as bfloat16"
    table.add(Line(name, rate, "tok/s", rate / plain, 1.5, 7))


def _uniform(table: Table, sizes: EngineSizes, device: torch.device, rates: dict[str, float]) -> None:
    work = Workload.uniform(sizes.uniform, *sizes.lengths)
    rates["uniform lengths"] = output_rate(load_for(sizes.uniform, device, [work]), work)
    table.add(Line(f"{sizes.uniform}, uniform lengths", rates["uniform lengths"], "tok/s"))


def _peer(
    table: Table, sizes: EngineSizes, device: torch.device, rates: dict[str, float], peer: str, name: str
) -> None:
    is_shared = name == "shared prompt"
    model = sizes.small if is_shared else sizes.uniform
    ours = rates.get(model if is_shared else name)
    if ours is None:
        raise PeerError("there is no figure of our own to compare with")
    work = Workload.shared(model, *sizes.shared) if is_shared else Workload.uniform(model, *sizes.lengths)
    limit = min(_PEER_SECONDS, table.seconds_left)
    theirs = peer_rate(peer, config_folder(model), work.prompts, work.max_tokens, device.type, limit)
    goal = {"shared prompt": 10.0, "uniform lengths": 2.0}[name] if peer == "transformers" else None
    table.add(Line(f"{model}, {name}: times as fast as {peer}", theirs, "tok/s", ours / theirs, goal, 6))
