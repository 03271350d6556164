"""Planning documents × questions, shuffled: time, memory, and how much of the shared prefixes the shards keep.

    python benchmarks/bench_planner.py [--documents 1000] [--questions 100] [--words 60] [--shard-rows 256]

Every row asks one question about one document; the document is in the middle of the prompt, after a system text that
all share. The tokenizer is the demo model's. The last line is JSON.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from random import Random
from typing import Any

from report import ROOT, print_result

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.text.tokenizer import Tokenizer
from headrace.jobs.planning.planner import Planner
from headrace.jobs.spec.schemas import JobSpec
from headrace.storage.readers import open_input
from headrace.storage.rows.spool import write_shard

MODEL = ROOT / "examples" / "tickets" / "model"
SYSTEM = ROOT / "examples" / "tickets" / "system.txt"
WORDS = [
    "refund",
    "order",
    "parcel",
    "invoice",
    "password",
    "screen",
    "delivery",
    "charge",
    "plan",
    "account",
    "error",
    "update",
    "cancel",
    "battery",
]


def write_input(path: Path, num_documents: int, num_questions: int, num_words: int) -> None:
    """One JSON line a row, in random order; the documents are drawn again for each of their rows."""
    generator = Random(7)
    pairs = [(document, question) for document in range(num_documents) for question in range(num_questions)]
    generator.shuffle(pairs)
    with path.open("w", encoding="utf-8") as file:
        for document, question in pairs:
            text = " ".join(Random(document).choices(WORDS, k=num_words))
            row = {"document": f"{document}: {text}", "question": f"What about point {question}?"}
            file.write(json.dumps(row) + "\n")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    path = folder / "input.jsonl"
    write_input(path, options.documents, options.questions, options.words)
    spec = JobSpec.parse(
        model=str(MODEL), system=SYSTEM.read_text(encoding="utf-8").strip(), prompt="{document}\n\n{question}"
    )
    planner = Planner(
        spec,
        ModelConfig.from_pretrained(MODEL),
        Tokenizer.from_pretrained(MODEL),
        options.shard_rows,
        sort_folder=folder,
        sort_memory_bytes=options.sort_memory_bytes,
    )
    start = time.perf_counter()
    with planner.plan(open_input(path)) as plan:
        read = time.perf_counter()
        num_shards = 0
        for shard in plan.shards():
            write_shard(folder / "spool" / f"shard-{num_shards:05d}.parquet", shard, plan.schema)
            num_shards += 1
        end = time.perf_counter()
        sharing = plan.sharing
        rows = plan.num_rows
    return {
        "rows": rows,
        "shards": num_shards,
        "prompt_tokens": sharing.prompt_tokens,
        "share_of_ideal": sharing.shared_tokens / sharing.shareable_tokens,
        "share_of_prompt": sharing.shared_tokens / sharing.prompt_tokens,
        "read_seconds": read - start,
        "write_seconds": end - read,
        "rows_per_second": rows / (end - start),
        "input_bytes": path.stat().st_size,
        "spool_bytes": sum(file.stat().st_size for file in (folder / "spool").iterdir()),
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=1000)
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--words", type=int, default=60)
    parser.add_argument("--shard-rows", type=int, default=256)
    parser.add_argument("--sort-memory-bytes", type=int, default=256 * 1024**2)
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(parser.parse_args(), Path(folder))
    print(
        f"{figures['rows']:,} rows, {figures['prompt_tokens']:,} tokens in {figures['shards']:,} shards: "
        f"{figures['rows_per_second']:,.0f} rows/s "
        f"({figures['read_seconds']:.1f} s to render, tokenize and sort, {figures['write_seconds']:.1f} s to spool)"
    )
    print(
        f"{figures['share_of_prompt']:.2%} of the prompt tokens shared inside shards, "
        f"{figures['share_of_ideal']:.2%} of what is possible; peak memory {figures['peak_rss_bytes'] / 2**20:,.0f} MiB"
    )
    print_result("planner", figures)


if __name__ == "__main__":
    main()
