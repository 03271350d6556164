"""From logits to tokens: milliseconds a step, by what the rows ask for.

    python benchmarks/bench_sampler.py

Batches of 64 and 256 rows over the vocabularies of SmolLM2 and Qwen2.5. Logits fall with the logarithm of a token's
rank, as a language model's do; "flat" ones hardly fall, as those of random weights. Before any time is printed, a
batch must draw what its rows draw alone. The last line is JSON.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from report import print_result
from torch import Tensor

from headrace.engine.sampling.adjustment import Adjustment
from headrace.engine.sampling.sampler import LogprobQuery, SampleRow, sample, token_logprobs
from headrace.engine.sampling_params import SamplingParams

BATCHES = (64, 256)
VOCABULARIES = (49_152, 151_936)
KINDS = ("bfloat16", "float32", "bfloat16 flat", "float32 flat")
HISTORY = 1_000
MAX_ROUNDS, MAX_SECONDS = 7, 1.0
GREEDY = SamplingParams(temperature=0)
CASES: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "temperature": SamplingParams(temperature=0.8),
    "top_k": SamplingParams(temperature=0.8, top_k=50),
    "top_p": SamplingParams(temperature=0.8, top_p=0.95),
    "min_p": SamplingParams(temperature=0.8, min_p=0.05),
    "top_k, top_p": SamplingParams(temperature=0.8, top_k=50, top_p=0.95),
    "penalties": SamplingParams(temperature=0, repetition_penalty=1.1, presence_penalty=0.5),
}


def draw_logits(rows: int, vocab: int, dtype: torch.dtype, steepness: float = 1.3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    ranks = torch.rand(rows, vocab, generator=generator).argsort(-1) + 1
    noise = torch.randn(rows, vocab, generator=generator)
    return (12 - steepness * ranks.log() + noise / 4).to(dtype)


def sample_rows(params: SamplingParams, rows: int, vocab: int) -> list[SampleRow]:
    generator = torch.Generator().manual_seed(1)
    result = []
    for index in range(rows):
        adjustment = Adjustment.of(params, (), HISTORY // 2)
        tokens = torch.randint(0, vocab, (HISTORY,), generator=generator).tolist()
        result.append(SampleRow(params, index, 7, adjustment and adjustment.after(tokens)))
    return result


def milliseconds(call: Callable[[], Any]) -> float:
    call()
    times: list[float] = []
    while len(times) < MAX_ROUNDS and sum(times) < MAX_SECONDS:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return median(times) * 1000


def check(logits: Tensor, rows: list[SampleRow]) -> None:
    few = [0, 1, len(rows) - 1]
    together = sample(logits.clone(), rows)
    if [sample(logits[index : index + 1].clone(), [rows[index]])[0] for index in few] != [together[i] for i in few]:
        sys.exit("a row's token depends on its neighbours: no speed is worth printing")


def measure(num_rows: int, vocab: int, kind: str) -> dict[str, float]:
    """Milliseconds of each case for logits of one kind."""
    is_flat = kind.endswith("flat")
    logits = draw_logits(num_rows, vocab, getattr(torch, kind.split()[0]), 0.1 if is_flat else 1.3)
    took = {}
    for name, params in CASES.items():
        if not is_flat or name in ("temperature", "top_p"):
            rows = sample_rows(params, num_rows, vocab)
            check(logits, rows)
            took[name] = milliseconds(partial(sample, logits, rows))
    if not is_flat:
        took["logprobs"] = milliseconds(partial(token_logprobs, logits, [3] * num_rows, [LogprobQuery(5)] * num_rows))
    return took


def main() -> None:
    figures: list[dict[str, Any]] = []
    print(f"{'rows':>5}{'vocabulary':>12}{'logits':>16}{'case':>14}{'ms':>9}")
    for num_rows, vocab, kind in product(BATCHES, VOCABULARIES, KINDS):
        for case, took in measure(num_rows, vocab, kind).items():
            figures.append({"rows": num_rows, "vocab": vocab, "logits": kind, "case": case, "ms": round(took, 2)})
            print(f"{num_rows:>5}{vocab:>12}{kind:>16}{case:>14}{took:>9.2f}", flush=True)
    print_result("sampler", {"figures": figures})


if __name__ == "__main__":
    main()
