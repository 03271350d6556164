"""What the engine's own work costs, with a model that computes nothing.

    python benchmarks/bench_scheduler.py [--requests 10000] [--pairs 15] [--steady-requests 50000]

Host time of a step by batch size, the same with what a GPU's graphs are given (attention's plan and all other inputs;
here they are copied within the host's memory, and nothing is launched) and where rows come and go in each step, the
cost of a prefix cache that never hits, and whether memory stays flat. The no-op model returns the same logits for every
row: all that is measured is ours. The last line is JSON.
"""

import argparse
import gc
import random
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from report import print_result, spread
from torch import Tensor

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.execution.batch import Batch
from headrace.engine.execution.cuda_graphs import CudaGraphs, GraphLimits, Replay
from headrace.engine.execution.graph_sizes import default_sizes, max_graphs
from headrace.engine.execution.runner import BlockMemory, Runner
from headrace.engine.kv_cache.swap import PreemptionCosts
from headrace.engine.lora.adapters import LoraAdapters
from headrace.engine.request import Request, RequestOutputKind
from headrace.engine.sampling_params import SamplingParams
from headrace.kernels import device
from headrace.kernels.paged_attention import AttentionMetadata
from headrace.kernels.paged_attention.attention_shape import AttentionShape
from headrace.kernels.paged_attention.device_plan import DevicePlan
from headrace.kernels.paged_attention.planning import plan_attention
from headrace.kernels.recurrent_states import StateSlots

VOCAB_SIZE = 32
CONTEXT = 4096
BATCH_SIZES = (1, 4, 16, 64, 256)
GRAPHED_BATCH_SIZES = (1, 16, 64, 256)
WARM_UP_STEPS = 20
TIMED_STEPS = 200
MAX_NEW_TOKENS = WARM_UP_STEPS + TIMED_STEPS + 20

# Beside a GPU: Llama-3-8B's attention on an H200, prompts that share their first tokens.
SHAPE = AttentionShape(num_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
NUM_PROCESSORS = 132
SHARED_TOKENS, OWN_TOKENS = 2048, 128
# The default for a model of half a billion parameters, in steps of up to as many.
GRAPHED_TOKENS = 8192
# Rows that a label each is asked of, and rows of which one ends in each step.
LABEL_TOKENS = 32
MIXED_NEW_TOKENS = (8, 256)


class NoMemory(BlockMemory):
    """Blocks without content."""

    block_bytes = 1

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def zero(self, blocks: Sequence[int]) -> None: ...

    def swap_out(self, blocks: Sequence[int]) -> None: ...

    def swap_in(self, content: None, first: int, blocks: Sequence[int]) -> None: ...


class NoOpRunner(Runner):
    """Gives every row the same logits."""

    vocab_size = VOCAB_SIZE
    device = torch.device("cpu")
    sliding_window: int | None = None
    preemption_costs = PreemptionCosts(1.0, 1.0, 1.0)
    num_states = 0
    loras: LoraAdapters | None = None
    processes = None

    def __init__(self, num_blocks: int) -> None:
        self._memory = NoMemory(num_blocks)
        self._logits = torch.arange(VOCAB_SIZE, dtype=torch.float32)

    @property
    def memory(self) -> BlockMemory:
        return self._memory

    def execute(self, batch: Batch) -> Tensor:
        return self._logits.expand(len(batch.last_token_index), -1)


class GraphedRunner(NoOpRunner):
    """Puts each step where CUDA graphs would read it, and replays none."""

    def __init__(self, num_blocks: int, config: EngineConfig) -> None:
        super().__init__(num_blocks)
        sizes = default_sizes(config.max_num_seqs, GRAPHED_TOKENS)
        limits = GraphLimits(
            sizes,
            CONTEXT // config.block_size,
            config.block_size,
            config.max_num_seqs,
            max_graphs(config, len(sizes)),
        )
        self._graphs = CudaGraphs(plan_only, limits, self.device, capture_nothing)

    def execute(self, batch: Batch) -> Tensor:
        hidden = self._graphs.forward(batch)
        return self._logits.expand(len(batch.wanted(hidden)), -1)


def plan_only(
    token_ids: Tensor, positions: Tensor, slots: Tensor, attention: AttentionMetadata, states: StateSlots | None
) -> Tensor:
    """A forward pass of one layer that plans its attention, if there is no plan yet, and computes nothing."""
    if not attention.device_plans:
        plan = plan_attention(attention, SHAPE)
        attention.device_plans[SHAPE, None] = DevicePlan.holding(plan, SHAPE.num_heads, 1, attention.device)
    return torch.zeros(len(token_ids), 1)


def capture_nothing(function: Callable[[], None]) -> Replay:
    return lambda: None


@dataclass(frozen=True)
class Traffic:
    """Requests of random prompts: but for the first `shared_tokens` no two share a block.

    With something shared, prompts are of 16 different lengths, so that rows begin their blocks in different steps.
    """

    prompt_tokens: int
    new_tokens: int
    shared_tokens: int = 0
    output_kind: RequestOutputKind = RequestOutputKind.DELTA

    def requests(self, number: int, seed: int = 0) -> Iterator[Request]:
        generator = random.Random(seed)
        params = SamplingParams(temperature=0, max_tokens=self.new_tokens, ignore_eos=True)
        shared = [generator.randrange(VOCAB_SIZE) for _ in range(self.shared_tokens)]
        for index in range(number):
            num_own = self.prompt_tokens - self.shared_tokens + (index % 16 if shared else 0)
            prompt = shared + [generator.randrange(VOCAB_SIZE) for _ in range(num_own)]
            yield Request(f"{seed}/{index}", prompt, params, output_kind=self.output_kind)


def new_engine(**options: Any) -> Engine:
    config = EngineConfig(**{"max_num_seqs": 256, "max_num_batched_tokens": 8192, **options})
    return Engine(NoOpRunner(num_blocks=20_000), config, CONTEXT)


def drain(engine: Engine, requests: Iterator[Request], in_flight: int) -> None:
    """Run all requests, never more than `in_flight` in the engine."""
    live = 0
    exhausted = False
    while live or not exhausted:
        while live < in_flight and not exhausted:
            request = next(requests, None)
            exhausted = request is None
            if request is not None:
                engine.add(request)
                live += 1
        live -= sum(event.finished for event in engine.step())


def decode_step_seconds(batch_size: int, is_ahead: bool = False) -> dict[str, float]:
    """A step that decodes one token of each of `batch_size` sequences, all of it: schedule, batch, sample, events.

    With `is_ahead` as beside a GPU, each launched before the one before it is read.
    """
    return step_seconds(new_engine(async_scheduling=is_ahead), batch_size, Traffic(64, MAX_NEW_TOKENS))


def graphed_step_seconds(batch_size: int, output_kind: RequestOutputKind) -> dict[str, float]:
    """As `decode_step_seconds`, one step ahead, with what CUDA graphs are given of each step."""
    traffic = Traffic(SHARED_TOKENS + OWN_TOKENS, MAX_NEW_TOKENS, SHARED_TOKENS, output_kind)
    return step_seconds(graphed_engine(), batch_size, traffic)


def graphed_engine() -> Engine:
    config = EngineConfig(max_num_seqs=256, max_num_batched_tokens=8192, async_scheduling=True)
    return Engine(GraphedRunner(20_000, config), config, CONTEXT)


def mixed_step_seconds(new_tokens: int, batch_size: int = 256) -> dict[str, float]:
    """As `graphed_step_seconds`, where in every step rows end and others begin: `batch_size / new_tokens` of them."""
    engine = graphed_engine()
    traffic = Traffic(SHARED_TOKENS + LABEL_TOKENS, new_tokens, SHARED_TOKENS, RequestOutputKind.FINAL_ONLY)
    num_ending = batch_size * (WARM_UP_STEPS + TIMED_STEPS) // new_tokens
    for index, request in enumerate(traffic.requests(2 * batch_size + num_ending)):
        # Those that begin together end in different steps.
        max_tokens = 1 + index % new_tokens if index < batch_size else new_tokens
        engine.add(replace(request, params=replace(request.params, max_tokens=max_tokens)))
    for _ in range(WARM_UP_STEPS):
        engine.step()
    return timed_steps(engine, min_tokens=batch_size // 2)


def timed_steps(engine: Engine, min_tokens: int) -> dict[str, float]:
    """Seconds a step, each of which is to bring so many tokens."""
    seconds = []
    gc.collect()
    for _ in range(TIMED_STEPS):
        before, start = engine.num_generated_tokens, time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
        assert engine.num_generated_tokens - before >= min_tokens
    # The mean has the steps in it that begin and fill blocks: all rows at once, in two steps of sixteen, where prompts
    # are of one length.
    return {**spread(seconds), "mean": sum(seconds) / len(seconds)}


def step_seconds(engine: Engine, batch_size: int, traffic: Traffic) -> dict[str, float]:
    for request in traffic.requests(batch_size):
        engine.add(request)
    # Prefill takes several steps.
    while engine.stats.num_running < batch_size:
        engine.step()
    for _ in range(WARM_UP_STEPS):
        engine.step()
    return timed_steps(engine, min_tokens=batch_size)


def all_requests(number: int) -> dict[str, Any]:
    """Requests through the engine, 256 at a time."""
    engine = new_engine()
    start = time.perf_counter()
    drain(engine, Traffic(64, 16).requests(number), in_flight=512)
    seconds = time.perf_counter() - start
    stats = engine.stats
    return {
        "requests": number,
        "seconds": seconds,
        "requests_per_second": number / seconds,
        "host_ms_per_step": 1000 * seconds / stats.num_steps,
    }


def prefix_cache_cost(pairs: int, requests: int = 1024) -> dict[str, Any]:
    """What the prefix cache adds where nothing is ever found: per cent of host time, and microseconds a request of 64
    tokens in and 64 out.

    The model's own time comes on top of the host's: what a user sees of the per cent is a fraction. Two engines, with
    and without, take steps in turns, and it is their processor time that is compared: what else the machine does
    hits both alike, where runs one after the other differed by tens of per cent.
    """
    percent, microseconds = [], []
    for pair in range(pairs):
        seconds = step_in_turns(list(Traffic(64, 64).requests(requests, seed=pair)))
        percent.append(100 * (seconds[True] / seconds[False] - 1))
        microseconds.append(1e6 * (seconds[True] - seconds[False]) / requests)
    return {"percent_of_host_time": spread(percent), "microseconds_per_request": spread(microseconds)}


def step_in_turns(asked: Sequence[Request]) -> dict[bool, float]:
    """Processor time of all the steps that the requests take, with the prefix cache and without."""
    engines = {enabled: new_engine(enable_prefix_caching=enabled) for enabled in (False, True)}
    for engine in engines.values():
        for request in asked:
            engine.add(request)
    seconds = dict.fromkeys(engines, 0.0)
    gc.collect()
    gc.disable()
    for number in count():
        # Which goes first alternates, so that neither profits from its place.
        for enabled in (True, False) if number % 2 else (False, True):
            start = time.thread_time()
            engines[enabled].step()
            seconds[enabled] += time.thread_time() - start
        if not any(engine.has_work for engine in engines.values()):
            break
    gc.enable()
    return seconds


def steady_memory(number: int, reports: int = 10) -> list[dict[str, float]]:
    """Resident memory while so many requests pass through one engine."""
    engine = new_engine(num_gpu_blocks_override=None)
    seen: list[dict[str, float]] = []
    numbers = count()
    for _ in range(reports):
        drain(engine, Traffic(16, 2).requests(number // reports, seed=next(numbers)), in_flight=512)
        gc.collect()
        seen.append({"requests": number // reports * (len(seen) + 1), "rss_mib": resident_mib()})
        print(f"  {seen[-1]['requests']:>9,} requests  {seen[-1]['rss_mib']:8.1f} MiB")
    return seen


def resident_mib() -> float:
    status = Path("/proc/self/statm")
    if status.exists():
        return int(status.read_text().split()[1]) * resource.getpagesize() / 2**20
    # Elsewhere only the peak is to be had, in KiB or, on macOS, bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steady-requests", type=int, default=50_000)
    options = parser.parse_args()
    figures: dict[str, Any] = {
        "decode_step_seconds": {},
        "decode_step_ahead_seconds": {},
        "graphed_step_seconds": {},
        "graphed_final_only_step_seconds": {},
    }
    for batch_size in BATCH_SIZES:
        seconds = figures["decode_step_seconds"][batch_size] = decode_step_seconds(batch_size)
        ahead = figures["decode_step_ahead_seconds"][batch_size] = decode_step_seconds(batch_size, is_ahead=True)
        each = (1e6 * figure for figure in (seconds["median"], seconds["mean"], ahead["median"], ahead["mean"]))
        print("batch {:>4}  {:8.0f} µs a step (mean {:.0f}), {:.0f} one ahead (mean {:.0f})".format(batch_size, *each))
    # As many work items as there.
    device._INTERPRETED_PROCESSORS = NUM_PROCESSORS
    device.num_processors.cache_clear()
    for batch_size in GRAPHED_BATCH_SIZES:
        told = figures["graphed_step_seconds"][batch_size] = graphed_step_seconds(batch_size, RequestOutputKind.DELTA)
        seconds = graphed_step_seconds(batch_size, RequestOutputKind.FINAL_ONLY)
        figures["graphed_final_only_step_seconds"][batch_size] = seconds
        each = (1e6 * figure for figure in (told["median"], told["mean"], seconds["median"], seconds["mean"]))
        line = "batch {:>4}  {:8.0f} µs a step (mean {:.0f}), one ahead, with a graph's inputs"
        print(f"{line}; {{:.0f}} (mean {{:.0f}}) where answers are told at their end".format(batch_size, *each))
    figures["mixed_step_seconds"] = {}
    for new_tokens in MIXED_NEW_TOKENS:
        seconds = figures["mixed_step_seconds"][new_tokens] = mixed_step_seconds(new_tokens)
        each = (1e6 * figure for figure in (seconds["median"], seconds["mean"]))
        print("outputs of {:>4}  {:5.0f} µs a step (mean {:.0f}), 256 rows that come and go".format(new_tokens, *each))
    if options.requests:
        figures["all_requests"] = done = all_requests(options.requests)
        print(f"{done['requests']:,} requests at {done['requests_per_second']:,.0f}/s")
    if options.pairs:
        figures["prefix_cache_cost"] = cost = prefix_cache_cost(options.pairs)
        percent, each = (cost[name]["median"] for name in ("percent_of_host_time", "microseconds_per_request"))
        print(f"prefix cache without a hit: {percent:+.2f} % of host time, {each:+.1f} µs a request")
    if options.steady_requests:
        figures["memory"] = steady_memory(options.steady_requests)
    print_result("scheduler", figures)


if __name__ == "__main__":
    main()
