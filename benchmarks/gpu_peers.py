"""Other engines on `gpu.py`'s workloads, each in a process of its own: it may fail, and not take the table with it.

    python benchmarks/gpu_peers.py transformers WORKLOAD.json    # prints output tokens per second

The workload: `config` (a folder with a config.json), `prompts`, `max_tokens`, `device`.
"""

import json
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PEERS = ("transformers", "vllm")


class PeerError(Exception):
    """A peer could not be measured; the message is one line that says why."""


def peer_rate(
    peer: str, config: Path, prompts: list[list[int]], max_tokens: list[int], device: str, limit: float
) -> float:
    """Output tokens per second of a peer. Raises `PeerError` where it is not here, fails, or takes `limit` seconds."""
    if find_spec(peer) is None:
        raise PeerError(f"{peer} is not installed here")
    work = {"config": str(config), "prompts": prompts, "max_tokens": max_tokens, "device": device}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "workload.json"
        file.write_text(json.dumps(work))
        try:
            done = subprocess.run(
                [sys.executable, __file__, peer, file], capture_output=True, text=True, timeout=limit, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise PeerError(f"{peer} took more than {limit:.0f} s") from error
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise PeerError(f"{peer} failed: {said[:200]}")
    return float(lines[-1])


def _transformers(work: dict[str, Any]) -> float:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    is_gpu = work["device"] == "cuda"
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(work["config"])
    with torch.device(work["device"]):
        dtype = torch.bfloat16 if is_gpu else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").eval()
    options: dict[str, Any] = {}
    if not is_gpu:
        from transformers import ContinuousBatchingConfig

        options["continuous_batching_config"] = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=256)

    def run(prompts: list[list[int]], max_tokens: int) -> None:
        generation = GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        model.generate_batch(inputs=prompts, generation_config=generation, progress_bar=False, **options)

    run(work["prompts"][:2], 2)
    # It takes one length for all: rows of about one length go together, as its users would do.
    parts = _by_length(work)
    start = time.perf_counter()
    for max_tokens, prompts in parts:
        run(prompts, max_tokens)
    elapsed = time.perf_counter() - start
    return sum(max_tokens * len(prompts) for max_tokens, prompts in parts) / elapsed


def _by_length(work: dict[str, Any], num_parts: int = 4) -> list[tuple[int, list[list[int]]]]:
    """The prompts in parts of similar numbers of tokens out, each with its mean: all of one where they are equal."""
    rows = sorted(zip(work["max_tokens"], work["prompts"], strict=True), key=lambda row: row[0])
    if rows[0][0] == rows[-1][0]:
        return [(rows[0][0], [prompt for _, prompt in rows])]
    size = -(-len(rows) // num_parts)
    parts = [rows[begin : begin + size] for begin in range(0, len(rows), size)]
    return [(sum(length for length, _ in part) // len(part), [prompt for _, prompt in part]) for part in parts]


def _vllm(work: dict[str, Any]) -> float:
    from vllm import LLM, SamplingParams

    longest = max(len(prompt) + length for prompt, length in zip(work["prompts"], work["max_tokens"], strict=True))
    llm = LLM(
        work["config"], load_format="dummy", skip_tokenizer_init=True, max_model_len=longest, enable_prefix_caching=True
    )

    def run(count: int | None) -> None:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in work["max_tokens"][:count]]
        llm.generate([{"prompt_token_ids": prompt} for prompt in work["prompts"][:count]], params, use_tqdm=False)

    run(2)
    start = time.perf_counter()
    run(None)
    return float(sum(work["max_tokens"]) / (time.perf_counter() - start))


if __name__ == "__main__":
    measure = {"transformers": _transformers, "vllm": _vllm}[sys.argv[1]]
    print(measure(json.loads(Path(sys.argv[2]).read_text())))
