"""OpenVINO GenAI's continuous batching (an environment from `install.sh openvino`).

It shares no prefix among requests that are admitted together, so that each prefix is a request of its own first.
"""

from typing import Any

import openvino as ov
import openvino_genai as genai
from protocol import Generate, Prompts, by_prefix, num_threads, serve

# Without its instructions it refuses keys and values in bfloat16.
HAS_BFLOAT16 = "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "int8": f"int8 weights, {'bf16' if HAS_BFLOAT16 else 'f32'}"}
# More than any workload fills.
CACHE_GIB = 1


def properties(precision: str) -> dict[str, Any]:
    activations = "bf16" if HAS_BFLOAT16 and precision != "float32" else "f32"
    return {
        "PERFORMANCE_HINT": "LATENCY",
        # With one thread, its bfloat16 layers for AMX divide by zero.
        "INFERENCE_NUM_THREADS": max(2, num_threads()),
        "INFERENCE_PRECISION_HINT": activations,
        # Its default is 8 bits: W1 took 1.25 times as long with that on two cores of a Xeon with AMX, W2 as long.
        "KV_CACHE_PRECISION": activations,
    }


def greedy(max_tokens: int) -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.do_sample = False
    config.ignore_eos = True
    config.max_new_tokens = max_tokens
    return config


def load(model: str, precision: str, _: int) -> Generate:
    scheduling = genai.SchedulerConfig()
    scheduling.enable_prefix_caching = True
    scheduling.max_num_batched_tokens = 2048
    scheduling.cache_size = CACHE_GIB
    pipeline = genai.ContinuousBatchingPipeline(model, scheduling, "CPU", properties(precision))

    def run(prompts: Prompts, max_tokens: list[int]) -> list[list[int]]:
        tensors = [ov.Tensor([prompt]) for prompt in prompts]
        results = pipeline.generate(tensors, [greedy(count) for count in max_tokens])
        return [list(result.m_generation_ids[0]) for result in results]

    def generate(prompts: Prompts, max_tokens: list[int], shared: int) -> list[list[int]]:
        prefixes = [prefix for prefix, _ in by_prefix(prompts, shared)] if shared else []
        # One alone, since those of nested prefixes have a beginning in common.
        for first in (prefixes[:1], prefixes[1:]):
            if first:
                run(first, [1] * len(first))
        return run(prompts, max_tokens)

    return generate


if __name__ == "__main__":
    serve(genai.__version__, PRECISIONS, load)
