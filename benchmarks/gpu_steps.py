"""Where a decode step's time goes, for `gpu.py`: the host's share of it, and how long the device has nothing to do."""

import time
from collections.abc import Iterable
from itertools import count
from statistics import median
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from headrace.engine.batch import Batch
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.llm import LLM
from headrace.engine.request import Request, SamplingParams
from headrace.engine.swap import PreemptionCosts

_VOCAB_SIZE = 512
_ids = count()


class NoMemory:
    """KV blocks that hold nothing."""

    block_bytes = 1

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    def copy(self, pairs: Any) -> None: ...

    def zero(self, blocks: Any) -> None: ...

    def swap_out(self, blocks: Any) -> None: ...

    def swap_in(self, content: Any, first: int, blocks: Any) -> None: ...


class NoModel:
    """A model that takes no time: what is left of a step is the host's, and the choice of tokens."""

    vocab_size = _VOCAB_SIZE
    sliding_window: int | None = None
    preemption_costs = PreemptionCosts(1.0, 1.0, 1.0)

    def __init__(self, max_num_seqs: int, num_blocks: int, device: torch.device) -> None:
        self.device = device
        self.memory = NoMemory(num_blocks)
        self._logits = torch.randn(max_num_seqs, _VOCAB_SIZE, device=device)

    def execute(self, batch: Batch) -> torch.Tensor:
        return self._logits[: len(batch.last_token_index)]


def host_microseconds(device: torch.device, batch: int, steps: int) -> float:
    """Median time of a decode step of `batch` sequences without a model."""
    config = EngineConfig(max_num_seqs=batch, max_num_batched_tokens=max(8192, batch), enable_prefix_caching=True)
    blocks = batch * (2 + steps // config.block_size)
    engine = Engine(NoModel(batch, blocks, device), config, max_position_embeddings=4 * (steps + 32))
    _fill(engine, [[1 + index % 500, 2, 3] for index in range(batch)], steps)
    times = []
    for _ in range(steps - 2):
        start = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - start)
    _drain(engine)
    return median(times) * 1e6


def idle_fraction(llm: LLM, prompts: list[list[int]], steps: int) -> float:
    """Share of the time of decode steps in which the device computes nothing; of a CPU, in which torch does not."""
    is_gpu = torch.cuda.is_available()
    _fill(llm.engine, prompts, steps + 4)
    activity, kind = (ProfilerActivity.CUDA, DeviceType.CUDA) if is_gpu else (ProfilerActivity.CPU, DeviceType.CPU)
    with profile(activities=[activity]) as profiled:
        for _ in range(steps):
            llm.engine.step()
    _drain(llm.engine)
    events: Iterable[Any] = profiled.events() or ()
    return idle_share([(each.time_range.start, each.time_range.end) for each in events if each.device_type == kind])


def idle_share(intervals: list[tuple[float, float]]) -> float:
    """What part of the time from the first interval's begin to the last one's end lies in none of them."""
    ordered = sorted(intervals)
    busy, reached = 0.0, ordered[0][0]
    for begin, end in ordered:
        busy += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return 1 - busy / (reached - ordered[0][0])


def _fill(engine: Engine, prompts: list[list[int]], max_tokens: int) -> None:
    """Begin to answer the prompts; what follows are decode steps."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    waiting = {f"step-{next(_ids)}": prompt for prompt in prompts}
    for request_id, prompt in waiting.items():
        engine.add(Request(request_id, prompt, params))
    begun: set[str] = set()
    while len(begun) < len(waiting):
        begun |= {event.request_id for event in engine.step()}


def _drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
