"""How an adapter talks with the benchmark: a JSON request a line on stdin, a JSON reply a line on stdout."""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

# (model folder, dtype, max_model_len) → generate; generate(prompts, max_tokens, shared_tokens) → new token ids.
Generate = Callable[[list[list[int]], list[int], int], list[list[int]]]
Load = Callable[[str, str, int], Generate]


def serve(version: str, load: Load) -> None:
    """Load what the first request names, then time every further one, until stdin ends."""
    replies = _own_stdout()
    generate: Generate | None = None
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        if generate is None:
            generate = load(request["model"], request["dtype"], request["max_model_len"])
            reply: dict[str, Any] = {"version": version}
        else:
            tokens = generate(request["prompts"], request["max_tokens"], request["shared_tokens"])
            reply = {"tokens": tokens}
        reply |= {"seconds": time.perf_counter() - start, "peak_rss_bytes": _peak_rss_bytes()}
        print(json.dumps(reply), file=replies, flush=True)


def _own_stdout() -> Any:
    """A file that replies alone are written to: what libraries print goes to stderr."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _peak_rss_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
