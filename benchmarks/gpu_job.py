"""Whole jobs on one GPU: rows that share a long system prompt, short answers, by one worker on it and by several.

    python benchmarks/gpu_job.py [--rows 24000] [--workers 1 2] [--model M2]

`headrace run` with workers that are there already, embedded Valkey, SQLite and a folder of Parquet. Weights are random,
of Qwen2.5-0.5B's shape, the tokenizer is that of examples/tickets. Each number of workers gets a job of its own, after
a smaller one that compiles kernels and captures graphs; the memory for keys and values is divided among them. What the
GPU did meanwhile is asked of `nvidia-smi`, where there is one. The last line is JSON.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from gpu_engine import checkpoint_folder
from report import ROOT, print_result
from services import COMMAND, worker
from tokenizers import Tokenizer

EXAMPLE = ROOT / "examples" / "tickets" / "model"
ROW_TOKENS, ANSWER_TOKENS = 120, 8
# Of an H200's, beside a small model.
KV_BYTES = 60_000_000_000
_WORDS = [
    "order",
    "parcel",
    "invoice",
    "refund",
    "login",
    "screen",
    "broken",
    "late",
    "wrong",
    "again",
    "please",
    "help",
    "account",
    "payment",
    "address",
]
_RATE = re.compile(r"^rate +([\d,.]+) rows/s, ([\d,]+) tokens/s", re.MULTILINE)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=24_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="how many share the GPU")
    parser.add_argument("--model", default="M2", help="a shape of shapes.py, or of gpu_engine.py")
    parser.add_argument("--system-tokens", type=int, default=2000, help="about so many all rows begin with")
    parser.add_argument("--kv-bytes", type=int, default=KV_BYTES, help="for keys and values, of all workers together")
    options = parser.parse_args()
    model = checkpoint_folder(options.model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EXAMPLE / name, model)
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), model, options.rows, options.system_tokens)
        figures = {f"workers_{number}": job.figures(number, options.kv_bytes) for number in options.workers}
    print_result("gpu-job", {"rows": options.rows, "model": options.model, **figures})


class Job:
    """The same rows for any number of workers."""

    def __init__(self, folder: Path, model: Path, num_rows: int, system_tokens: int) -> None:
        self._folder, self._model = folder, model
        ours = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        self._env = {**ours, "HEADRACE_DATA_DIR": str(folder / "data")}
        self._rows, self._few, self._system = (folder / name for name in ("rows.jsonl", "few.jsonl", "system.txt"))
        texts = Texts(Tokenizer.from_file(str(model / "tokenizer.json")))
        self._system.write_text(texts.text(system_tokens))
        lines = [json.dumps({"text": f"{row} {texts.text(ROW_TOKENS)}"}) + "\n" for row in range(num_rows)]
        self._rows.write_text("".join(lines))
        self._few.write_text("".join(lines[: num_rows // 16]))

    def figures(self, num_workers: int, kv_bytes: int) -> dict[str, Any]:
        limits = ("--max-num-seqs", "1024", "--max-num-batched-tokens", "8192")
        kv = ("--kv-cache-memory-bytes", str(kv_bytes // num_workers))
        with ExitStack() as stack:
            for number in range(num_workers):
                stack.enter_context(worker(self._env, self._folder / f"{number}.log", self._model, (*limits, *kv)))
            self._run(self._few)
            gpu = GpuUse()
            with gpu:
                said = self._run(self._rows)
        found = _RATE.search(said)
        assert found, said
        rows_per_second, tokens_per_second = (float(each.replace(",", "")) for each in found.groups())
        print(f"workers {num_workers}: {rows_per_second:,.0f} rows/s, {tokens_per_second:,.0f} tokens/s", flush=True)
        return {"rows_per_second": rows_per_second, "tokens_per_second": tokens_per_second, **gpu.figures()}

    def _run(self, rows: Path) -> str:
        asked = ("--system", f"@{self._system}", "--prompt", "{text}")
        answers = ("--max-tokens", str(ANSWER_TOKENS), "--ignore-eos", "--output", str(self._folder / "out"))
        command = [*COMMAND, "run", str(rows), "--model", str(self._model), *asked, *answers, "--overwrite"]
        done = subprocess.run(command, env=self._env, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(f"headrace run ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        return done.stdout


class Texts:
    """Random ones of about so many tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._random = random.Random(0)
        words = " ".join(_WORDS)
        self._words_per_token = len(_WORDS) / len(tokenizer.encode(words).ids)

    def text(self, num_tokens: int) -> str:
        return " ".join(self._random.choices(_WORDS, k=round(num_tokens * self._words_per_token)))


class GpuUse:
    """How busy the GPU is, and what power it takes, every second until the context ends."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc_info: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        query = ["nvidia-smi", "--query-gpu=utilization.gpu,power.draw", "--format=csv,noheader,nounits", "--id=0"]
        while shutil.which(query[0]) and not self._ended.wait(1.0):
            done = subprocess.run(query, capture_output=True, text=True, check=True)
            busy, watts = map(float, done.stdout.split(","))
            self._samples.append((busy, watts))

    def figures(self) -> dict[str, float]:
        """Of the seconds in which it did anything."""
        at_work = [sample for sample in self._samples if sample[0] > 0]
        if not at_work:
            return {}
        return {"busy_percent": median(busy for busy, _ in at_work), "watts": median(watts for _, watts in at_work)}


if __name__ == "__main__":
    main()
