"""vLLM on a CPU, with the settings that measured fastest (an environment from `install.sh vllm`)."""

import os
import sys
from pathlib import Path
from typing import Any

from protocol import Generate, Prompts, num_threads, serve

PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "int8": "int8 W8A8"}

ENVIRONMENT = {
    # GiB: more than any workload fills.
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": f"0-{num_threads() - 1}",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
# vLLM refuses torch's allocator and OpenMP in favour of these, where they are found.
PRELOADED = ("libtcmalloc_minimal.so.4", "libiomp5.so")


def restart_with_environment() -> None:
    """Libraries are preloaded at a process's start only, so that this one starts once more."""
    if ENVIRONMENT.items() <= os.environ.items():
        return
    libraries = [str(file) for name in PRELOADED if (file := Path(sys.prefix, "lib", name)).is_file()]
    environment = os.environ | ENVIRONMENT | {"LD_PRELOAD": ":".join(libraries)}
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def load(model: str, precision: str, max_model_len: int) -> Generate:
    from vllm import LLM, SamplingParams

    llm: Any = LLM(
        model,
        dtype="bfloat16" if precision == "int8" else precision,
        skip_tokenizer_init=True,
        max_model_len=max_model_len,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        enable_prefix_caching=True,
    )

    def generate(prompts: Prompts, max_tokens: list[int], _: int) -> list[list[int]]:
        params = [
            SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False) for count in max_tokens
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


if __name__ == "__main__":
    restart_with_environment()
    from vllm import __version__

    serve(__version__, PRECISIONS, load)
