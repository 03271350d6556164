"""Steps in which rows end and others begin, for `gpu.py`: with CUDA graphs, and launched kernel by kernel.

It decides up to how many tokens there are graphs by default (`engine/execution/graph_sizes.py`): as far as a step is
shorter with one, its padding included.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from gpu_device import Timing
from gpu_engine import Workload, load_for
from gpu_table import Line

from headrace.engine.engine import Engine
from headrace.engine.execution.graph_sizes import default_sizes
from headrace.engine.execution.model_runner import ModelRunner
from headrace.engine.llm import LLM
from headrace.engine.request import Request, RequestOutputKind
from headrace.engine.sampling_params import SamplingParams

# Own tokens of a prompt, so that rows begin their blocks in different steps.
_LENGTHS = 16


@dataclass(frozen=True)
class MixedSizes:
    """`rows` at a time, of prompts that share `shared` tokens and have `own` and up to 15 more. answers: their tokens,
    in turns; `most`: tokens of a step. Steps are timed after some that warm up.
    """

    models: tuple[str, ...]
    rows: int
    shared: int
    own: int
    answers: tuple[int, ...]
    most: int
    warm_up: int
    steps: int


# Short labels with a few newcomers or with many, and long answers, where one row in each step is new.
GPU = MixedSizes(("M2", "llama-3-8b"), 256, 2048, 32, (8, 32, 256), most=2048, warm_up=30, steps=60)
DRY = MixedSizes(("gate",), 3, 16, 4, (2,), most=64, warm_up=2, steps=3)


@dataclass(frozen=True)
class MixedSteps:
    """seconds: of a step. tokens: the middle number of them in a step. captures: of graphs, in the steps that warm up
    and in those that are timed: there a step is as long as two for each.
    """

    seconds: Timing
    tokens: int
    captures: tuple[int, int]


def mixed_lines(sizes: MixedSizes, device: torch.device) -> Iterator[Line]:
    """Each way's step, how many times as fast as without graphs it is, and how many graphs were captured for it."""
    ways: dict[str, dict[str, Any]] = {
        "no graphs": {"enforce_eager": True},
        "graphs as by default": {},
        f"graphs of up to {sizes.most} tokens": {"cuda_graph_sizes": default_sizes(sizes.rows, sizes.most)},
        f"all padded to {sizes.most}": {"cuda_graph_sizes": (sizes.most,)},
    }
    for model in sizes.models:
        eager: dict[int, float] = {}
        for way, options in ways.items():
            for answer, steps in _measure(sizes, model, device, options):
                seconds = steps.seconds
                eager.setdefault(answer, seconds.median)
                name = f"{model}, answers of {answer}, {way}: a step of {steps.tokens}"
                ratio = eager[answer] / seconds.median
                yield Line(name, seconds.median * 1e6, "us", ratio, spread=seconds.spread)
                warming_up, timed = steps.captures
                yield Line(f"  graphs captured, {timed} of them while timed", warming_up + timed, "graphs")


def _measure(
    sizes: MixedSizes, model: str, device: torch.device, options: dict[str, Any]
) -> Iterator[tuple[int, MixedSteps]]:
    work = {answer: _work(sizes, model, answer) for answer in sizes.answers}
    limits = {"max_num_seqs": sizes.rows, "max_num_batched_tokens": sizes.most}
    llm = load_for(model, device, list(work.values()), **limits, **options)
    for answer, each in work.items():
        yield answer, mixed_steps(llm, each, sizes.warm_up, sizes.steps)


def _work(sizes: MixedSizes, model: str, answer: int) -> Workload:
    """Enough rows that they come and go to the end; those that begin together end in different steps."""
    number = 2 * sizes.rows + sizes.rows * (sizes.warm_up + sizes.steps) // answer
    longest = Workload.shared(model, number, sizes.shared, sizes.own + _LENGTHS - 1, answer, seed=answer)
    least = sizes.shared + sizes.own
    prompts = [prompt[: least + index % _LENGTHS] for index, prompt in enumerate(longest.prompts)]
    return Workload(prompts, [1 + index % answer if index < sizes.rows else answer for index in range(number)])


def mixed_steps(llm: LLM, work: Workload, warm_up: int, steps: int) -> MixedSteps:
    """What steps take while rows of `work` come and go; what is left of it afterwards is given up."""
    engine: Engine = llm.engine
    for index, (prompt, length) in enumerate(zip(work.prompts, work.max_tokens, strict=True)):
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        engine.add(Request(f"mixed-{index}", prompt, params, output_kind=RequestOutputKind.FINAL_ONLY))
    captured = [_num_captures(engine)]
    for _ in range(warm_up):
        engine.step()
    captured.append(_num_captures(engine))
    seconds, tokens = [], []
    for _ in range(steps):
        before, start = engine.stats.num_computed_tokens, time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - start)
        tokens.append(engine.stats.num_computed_tokens - before)
    captured.append(_num_captures(engine))
    for index in range(len(work.prompts)):
        engine.abort(f"mixed-{index}")
    while engine.has_work:
        engine.step()
    warming_up, timed = (after - before for before, after in pairwise(captured))
    return MixedSteps(Timing.of(seconds), int(median(tokens)), (warming_up, timed))


def _num_captures(engine: Engine) -> int:
    runner = engine._runner
    assert isinstance(runner, ModelRunner)
    return runner.num_captures
