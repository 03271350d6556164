"""What answers that follow a grammar cost: microseconds a row a step, and what others pay for it.

    python benchmarks/bench_guided.py [--before FOLDER] [--pairs 10]

The vocabulary has 65,536 tokens, byte-level BPE learned from Python's own library. Every row is somewhere else in the
same JSON. Before any time is printed each row's mask must allow what comes next in it. `--before` names a folder with
another version of this package in a folder `headrace`: then the host's time for steps without guided rows is
compared with it, in pairs. The last line is JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bench_sampler import draw_logits, milliseconds
from report import print_result, spread
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace.engine.sampling.adjustment import Adjustment
from headrace.engine.sampling.sampler import SampleRow, sample
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.structured.grammar import Grammar, GrammarCompiler
from headrace.engine.structured.guide import Guide
from headrace.engine.structured.structured_outputs import StructuredOutputsParams

VOCAB_SIZE = 65_536
END = 1
BATCHES = (1, 16, 64)
STEPS = 30
SCHEMA = {
    "type": "object",
    "properties": {
        "summary": {"type": "string", "maxLength": 200},
        "category": {"enum": ["billing", "delivery", "product", "other"]},
        "urgency": {"type": "integer", "minimum": 1, "maximum": 5},
        "products": {"type": "array", "items": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}},
        "customer": {"type": "object", "properties": {"name": {"type": "string"}, "since": {"format": "date"}}},
    },
    "required": ["summary", "category", "urgency", "products"],
    "additionalProperties": False,
}
ANSWER = {
    "summary": "The parcel arrived two weeks late, and one of the lamps in it was broken.",
    "category": "delivery",
    "urgency": 4,
    "products": ["LA-2040", "LA-2041"],
    "customer": {"name": "Ada Lovelace", "since": "2024-02-29"},
}
HOST_TIME = "import bench_scheduler; print(bench_scheduler.decode_step_seconds(64)['median'])"


def learned_tokenizer() -> Tokenizer:
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((file.read_text(errors="replace") for file in files), trainer)
    return tokenizer


def allows(guide: Guide, token: int) -> bool:
    return bool(int(guide.mask[token // 32]) >> (token % 32) & 1)


def guides_along(grammar: Grammar, answer: list[int], number: int) -> list[tuple[Guide, Iterator[int]]]:
    """Answers at different places, each with the tokens that come next."""
    result = []
    for index in range(number):
        guide, first = Guide(grammar, (END,), VOCAB_SIZE), index % (len(answer) - 1)
        for token in answer[:first]:
            if not allows(guide, token):
                sys.exit(f"a mask forbids token {token} of a right answer: no speed is worth printing")
            guide.advance(token)
        result.append((guide, iter(answer[first:])))
    return result


def microseconds_a_row(grammar: Grammar, answer: list[int], number: int) -> dict[str, float]:
    """A mask and an advance for each row, as the engine does it in a step."""
    masks, advances = [], []
    rows = guides_along(grammar, answer, number)
    for _ in range(STEPS):
        start = time.perf_counter()
        for guide, _ in rows:
            guide.refresh()
        masks.append((time.perf_counter() - start) / len(rows) * 1e6)
        tokens = [next(rest, None) for _, rest in rows]
        start = time.perf_counter()
        for (guide, _), token in zip(rows, tokens, strict=True):
            if token is not None:
                guide.advance(token)
        advances.append((time.perf_counter() - start) / len(rows) * 1e6)
        for place, token in enumerate(tokens):
            if token is None:
                rows[place] = guides_along(grammar, answer, 1)[0]
    return {"mask": median(masks), "mask_worst_step": max(masks), "advance": median(advances)}


def milliseconds_to_sample(grammar: Grammar, answer: list[int], number: int) -> dict[str, float]:
    """Of `sample` for a batch of greedy rows: without a grammar, and with masks that are there already."""
    logits = draw_logits(number, VOCAB_SIZE, torch.bfloat16)
    params = SamplingParams(temperature=0)
    plain = [SampleRow(params, index, 0) for index in range(number)]
    guided = []
    for guide, _ in guides_along(grammar, answer, number):
        guide.refresh()
        guided.append(SampleRow(params, 0, 0, Adjustment.of(params, (), 0, guide)))
    return {
        "plain": milliseconds(partial(sample, logits, plain)),
        "guided": milliseconds(partial(sample, logits, guided)),
    }


def host_seconds(before: Path | None) -> float:
    """Of a step of 64 rows without a grammar, in a process of its own."""
    environment = dict(os.environ)
    if before is not None:
        environment["PYTHONPATH"] = str(before)
    done = subprocess.run(
        [sys.executable, "-c", HOST_TIME],
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def compared(before: Path, pairs: int) -> dict[str, Any]:
    ratios = [host_seconds(None) / host_seconds(before) for _ in range(pairs)]
    return {"pairs": pairs, "ratio_to_before": spread(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--before", type=Path)
    parser.add_argument("--pairs", type=int, default=10)
    options = parser.parse_args()
    tokenizer = learned_tokenizer()
    start = time.perf_counter()
    compiler = GrammarCompiler(tokenizer)
    compiler_ms = (time.perf_counter() - start) * 1e3
    start = time.perf_counter()
    grammar = compiler.compile(StructuredOutputsParams(json=SCHEMA))
    compile_ms = (time.perf_counter() - start) * 1e3
    answer = tokenizer.encode(json.dumps(ANSWER)).ids
    figures: dict[str, Any] = {"vocab": VOCAB_SIZE, "tokenizer_ms": compiler_ms, "compile_ms": compile_ms}
    print(f"tokenizer {compiler_ms:.0f} ms, grammar {compile_ms:.2f} ms")
    for number in BATCHES:
        row = microseconds_a_row(grammar, answer, number)
        took = milliseconds_to_sample(grammar, answer, number)
        figures[f"batch_{number}"] = {"us_a_row": row, "sample_ms": took}
        print(
            f"batch {number:>3}: mask {row['mask']:6.1f} µs a row (worst step {row['mask_worst_step']:.1f}), advance "
            f"{row['advance']:.1f}; sample {took['plain']:.2f} ms, guided {took['guided']:.2f} ms",
            flush=True,
        )
    if options.before is not None:
        figures["without_guided_rows"] = compared(options.before.resolve(), options.pairs)
        print(f"without guided rows: {figures['without_guided_rows']['ratio_to_before']['median']:.3f} times as before")
    print_result("guided", figures)


if __name__ == "__main__":
    main()
