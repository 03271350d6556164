"""Other engines on `gpu.py`'s workloads, each in a process of its own: it may fail, and not take the table with it.

    python benchmarks/gpu_peers.py transformers WORKLOAD.json    # prints output tokens per second

The workload: `config` (a folder with a config.json), `prompts`, `max_tokens`, `device`, and `warm_up`: prompts of the
same lengths with other tokens, which are answered before the clock runs. Of those as many are as `warm_up_seconds`
suffice for; and after `timed_seconds` it is known that a peer does no more than all its tokens in that time.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_engine import Workload


class PeerError(Exception):
    """A peer could not be measured; the message is one line that says why."""


@dataclass(frozen=True)
class PeerRate:
    """Output tokens per second. `is_most`: it was not done in its time, and so no faster than that."""

    tokens_per_second: float
    is_most: bool


@dataclass(frozen=True)
class PeerSeconds:
    """What a peer may take to warm up, while it is timed, and in all, its start included."""

    warm_up: float
    timed: float
    whole: float


def peer_rate(peer: str, config: Path, work: "Workload", device: str, seconds: PeerSeconds) -> PeerRate:
    """How fast a peer is. Raises `PeerError` where it is not here, fails, or takes longer than it may."""
    if find_spec(peer) is None:
        raise PeerError(f"{peer} is not installed here")
    told = {
        "config": str(config),
        "prompts": work.prompts,
        "warm_up": work.with_other_tokens().prompts,
        "max_tokens": work.max_tokens,
        "device": device,
        "warm_up_seconds": seconds.warm_up,
        "timed_seconds": seconds.timed,
    }
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "workload.json"
        file.write_text(json.dumps(told))
        try:
            done = subprocess.run(
                [sys.executable, __file__, peer, file],
                # What it has not got here it is not to look for elsewhere.
                env=os.environ | {"HF_HUB_OFFLINE": "1"},
                capture_output=True,
                text=True,
                timeout=seconds.whole,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise PeerError(f"{peer} took more than {seconds.whole:.0f} s") from error
    lines = done.stdout.splitlines()
    if done.returncode or not lines:
        said = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise PeerError(f"{peer} failed: {said[:200]}")
    return PeerRate(**json.loads(lines[-1]))


def _transformers(work: dict[str, Any]) -> PeerRate:
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
    generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    # One for both: its cache and its CUDA graphs are there when the clock runs.
    with model.continuous_batching_context_manager(generation_config=generation, timeout=5, **options) as manager:
        _answer(manager, work["warm_up"], work["max_tokens"], work["warm_up_seconds"])
        start = time.perf_counter()
        is_done = _answer(manager, work["prompts"], work["max_tokens"], work["timed_seconds"])
        return PeerRate(sum(work["max_tokens"]) / (time.perf_counter() - start), not is_done)


def _answer(manager: Any, prompts: list[list[int]], max_tokens: list[int], seconds: float) -> bool:
    """Answer all prompts, each with as many tokens as it is to have; what is left after so long is called off.

    Returns whether nothing was left.
    """
    end = time.perf_counter() + seconds
    wanted = {
        manager.add_request(prompt, max_new_tokens=length): length
        for prompt, length in zip(prompts, max_tokens, strict=True)
    }
    while wanted and time.perf_counter() < end:
        result = manager.get_result(timeout=1)
        if result is None and not manager.is_running():
            raise PeerError("transformers stopped before all was answered")
        # One that was called off may still have an answer.
        if result is None or result.request_id not in wanted:
            continue
        if result.error is not None:
            raise PeerError(f"transformers failed: {result.error}")
        if result.is_finished():
            length = wanted.pop(result.request_id)
            if len(result.generated_tokens) != length:
                raise PeerError(f"transformers answered with {len(result.generated_tokens)} tokens, not {length}")
    for request_id in wanted:
        manager.cancel_request(request_id)
    return not wanted


def _vllm(work: dict[str, Any]) -> PeerRate:
    from vllm import LLM, SamplingParams

    longest = max(len(prompt) + length for prompt, length in zip(work["prompts"], work["max_tokens"], strict=True))
    llm = LLM(
        work["config"], load_format="dummy", skip_tokenizer_init=True, max_model_len=longest, enable_prefix_caching=True
    )

    def run(prompts: list[list[int]]) -> None:
        params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in work["max_tokens"]]
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)

    run(work["warm_up"])
    start = time.perf_counter()
    run(work["prompts"])
    return PeerRate(sum(work["max_tokens"]) / (time.perf_counter() - start), is_most=False)


if __name__ == "__main__":
    measure = {"transformers": _transformers, "vllm": _vllm}[sys.argv[1]]
    print(json.dumps(asdict(measure(json.loads(Path(sys.argv[2]).read_text())))))
