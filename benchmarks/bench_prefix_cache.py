"""The demo's 2,000 tickets through the engine with the prefix cache on and off, in one process, in turns.

    python benchmarks/bench_prefix_cache.py [--rows 2000] [--rounds 3]

Both engines must give the same labels before any speed is printed. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import ROOT, print_result, spread

from headrace import LLM, SamplingParams

TICKETS = ROOT / "examples" / "tickets"
WARM_UP_ROWS = 64


def conversations(rows: int) -> list[list[dict[str, str]]]:
    """Held-out tickets under the demo's system prompt."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tickets.jsonl"
        command = [sys.executable, str(TICKETS / "generate.py"), "--split", "heldout", "--seed", "7"]
        subprocess.run([*command, "--rows", str(rows), "--output", str(file)], check=True)
        texts = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]
    system = (TICKETS / "system.txt").read_text(encoding="utf-8").strip()
    return [[{"role": "system", "content": system}, {"role": "user", "content": text}] for text in texts]


def run(llm: LLM, chats: list[list[dict[str, str]]], params: SamplingParams) -> tuple[float, list[str], float]:
    """Seconds, labels, and the share of prompt tokens that were found in the cache."""
    start = time.perf_counter()
    outputs = llm.chat(chats, params)
    seconds = time.perf_counter() - start
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    cached_tokens = sum(output.num_cached_tokens for output in outputs)
    return seconds, [output.outputs[0].text for output in outputs], cached_tokens / prompt_tokens


def measure(rows: int, rounds: int) -> dict[str, Any]:
    chats = conversations(rows)
    params = SamplingParams(temperature=0, choices=labels())
    seconds: dict[bool, list[float]] = {True: [], False: []}
    answers: dict[bool, list[str]] = {}
    hit_rate = 0.0
    for _ in range(rounds):
        for enabled in (True, False):
            # A new engine each time: the cache starts empty, as a job finds it.
            llm = LLM(TICKETS / "model", enable_prefix_caching=enabled)
            llm.generate(["warm up"] * WARM_UP_ROWS, SamplingParams(temperature=0, max_tokens=1))
            elapsed, answers[enabled], share = run(llm, chats, params)
            seconds[enabled].append(elapsed)
            hit_rate = share if enabled else hit_rate
    if answers[True] != answers[False]:
        sys.exit("the labels with and without the prefix cache differ: no speed is worth printing")
    return {
        "rows": rows,
        "hit_rate": hit_rate,
        "seconds_on": spread(seconds[True]),
        "seconds_off": spread(seconds[False]),
        "ratio": spread([off / on for on, off in zip(seconds[True], seconds[False], strict=True)]),
    }


def labels() -> tuple[str, ...]:
    """The categories, in the order in which the Makefile names them."""
    line = next(line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith("labels :="))
    return tuple(line.partition(":=")[2].strip().split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    figures = measure(options.rows, options.rounds)
    for name in ("on", "off"):
        seconds = figures[f"seconds_{name}"]["median"]
        print(f"prefix cache {name:<4} {seconds:7.2f} s {figures['rows'] / seconds:8.1f} rows/s")
    print(
        f"ratio {figures['ratio']['median']:.2f} ({figures['ratio']['min']:.2f} to {figures['ratio']['max']:.2f}), "
        f"{figures['hit_rate']:.1%} of prompt tokens cached"
    )
    print_result("prefix_cache", figures)


if __name__ == "__main__":
    main()
