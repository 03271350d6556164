"""How an adapter talks with the benchmark: a JSON request a line on stdin, a JSON reply a line on stdout."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Prompts = list[list[int]]
# generate(prompts, max_tokens, shared_tokens) → new token ids; load(model folder, precision, max_model_len) → generate.
Generate = Callable[[Prompts, list[int], int], list[list[int]]]
Load = Callable[[str, str, int], Generate]


class CannotRunError(Exception):
    """Raised by `generate` for work that the engine has no way to do; the message is the table's footnote."""


def serve(version: str, precisions: dict[str, str], load: Load) -> None:
    """Load what the first request names, then time every further one, until stdin ends.

    `precisions` says in words what float32, bfloat16 and int8 are for this engine, of those it knows.
    """
    replies = _own_stdout()
    generate: Generate | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if generate is None:
            generate = load(request["model"], request["precision"], request["max_model_len"])
            reply: dict[str, Any] = {"version": version, "precision": precisions[request["precision"]]}
        else:
            reply = _timed(generate, request)
        reply["peak_rss_bytes"] = _peak_rss_bytes()
        print(json.dumps(reply), file=replies, flush=True)


def _timed(generate: Generate, request: dict[str, Any]) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        tokens = generate(request["prompts"], request["max_tokens"], request["shared_tokens"])
    except CannotRunError as error:
        return {"cannot_run": str(error)}
    return {"tokens": tokens, "seconds": time.perf_counter() - start}


def by_prefix(prompts: Prompts, shared: int) -> Iterator[tuple[list[int], list[int]]]:
    """Each distinct prefix of `shared` tokens with the numbers of the rows under it."""
    rows: dict[tuple[int, ...], list[int]] = {}
    for row, prompt in enumerate(prompts):
        rows.setdefault(tuple(prompt[:shared]), []).append(row)
    for prefix, members in rows.items():
        yield list(prefix), members


def num_threads() -> int:
    """A thread a core, or what OMP_NUM_THREADS allows: for engines that do not read it themselves."""
    return int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0))))


def _own_stdout() -> Any:
    """A file that replies alone are written to: what libraries print goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _peak_rss_bytes() -> int:
    # Not getrusage: what the benchmark's own process had resident at the fork counts there.
    status = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
