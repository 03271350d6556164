"""What a call of `LLM.generate` takes the host, with a model that computes nothing.

    python benchmarks/bench_intake.py [--rounds 5]

Prompts of token ids, of which each begins as all others do: as many that are answered at length, and four times as many
that want a few tokens. Until the first step is launched a GPU would have nothing to do, and after the last one is read;
between the two its own time hides what the host takes, as far as it is longer. Steps are launched one ahead, and what a
GPU's graphs are given is put in place. Tokens differ from round to round, so that no cache knows them. The last line
is JSON.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bench_scheduler import NUM_PROCESSORS, GraphedRunner
from gpu_engine import Workload, config_folder, generate
from report import print_result, spread
from torch import Tensor

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.execution.batch import Batch
from headrace.engine.llm import LLM
from headrace.kernels import device

MODEL = "M2"
# Requests, shared and own tokens of a prompt, tokens out.
SIZES = {"answers": (256, 2048, 128, 128), "labels": (1024, 2048, 128, 8)}
MAX_NUM_SEQS, CONTEXT, NUM_BLOCKS = 1024, 4096, 20_000


class NotedRunner(GraphedRunner):  # type: ignore[misc]
    """Computes nothing for prompts of a real vocabulary, and notes when the first step came, and the last."""

    vocab_size = 151_936

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(NUM_BLOCKS, config)
        self.begins: list[float] = []

    def execute(self, batch: Batch) -> Tensor:
        self.begins.append(time.perf_counter())
        logits: Tensor = super().execute(batch)
        return logits


class HostOnly(LLM):
    """The offline face of an engine that has no model."""

    def __init__(self) -> None:
        super().__init__(config_folder("gate"), device="cpu", load_format="dummy", skip_tokenizer_init=True)
        config = EngineConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=8192, async_scheduling=True)
        self.runner = NotedRunner(config)
        self._engine = Engine(self.runner, config, CONTEXT)


@dataclass(frozen=True)
class Round:
    """Seconds of a call: before its first step, from there to its last, and after that."""

    before: float
    between: float
    after: float

    @classmethod
    def of(cls, llm: HostOnly, work: Workload) -> "Round":
        llm.runner.begins.clear()
        begin = time.perf_counter()
        generate(llm, work)
        end = time.perf_counter()
        first, *_, last = llm.runner.begins
        return cls(first - begin, last - first, end - last)


def figures_of(size: tuple[int, int, int, int], rounds: int) -> dict[str, Any]:
    work = Workload.shared(MODEL, *size)
    llm = HostOnly()
    # The first to warm up.
    measured = [Round.of(llm, work.with_other_tokens(number)) for number in range(rounds + 1)][1:]
    return {
        "before_seconds": spread([each.before for each in measured]),
        "between_seconds": spread([each.between for each in measured]),
        "after_seconds": spread([each.after for each in measured]),
        "num_steps": len(llm.runner.begins),
    }


def line(name: str, size: Sequence[int], figures: dict[str, Any]) -> str:
    requests, shared, own, max_tokens = size
    parts = (1e3 * figures[f"{part}_seconds"]["median"] for part in ("before", "between", "after"))
    said = "{:.0f} ms before the first step, {:.0f} until the last, {:.0f} after".format(*parts)
    return f"{name}: {requests} prompts of {shared} + {own} tokens -> {max_tokens}: {said}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    # What else runs here is not to share in it.
    torch.set_num_threads(1)
    device._INTERPRETED_PROCESSORS = NUM_PROCESSORS
    device.num_processors.cache_clear()
    figures = {name: figures_of(size, options.rounds) for name, size in SIZES.items()}
    for name, size in SIZES.items():
        print(line(name, size, figures[name]))
    print_result("intake", figures)


if __name__ == "__main__":
    main()
