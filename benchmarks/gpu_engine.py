"""The engine's part of `gpu.py`: its tokens against the CPU's, and its speed on shared prompts."""

import json
import time
from pathlib import Path
from typing import Any

import torch
from gpu_kernels import Line
from report import ROOT
from shapes import SHAPES

from headrace.engine.llm import LLM
from headrace.engine.request import SamplingParams

LLAMA_3_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
}
CONFIGS = {"llama-3-8b": LLAMA_3_8B, **{name: shape.config for name, shape in SHAPES.items()}}


def check_engine(device: torch.device) -> None:
    """Greedy tokens of a small float32 model are the same on the device and the CPU. Raises `AssertionError`."""
    prompts = _prompts("gate", 6, 64, 9)
    options: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 200, "max_model_len": 256}
    tokens = [_generate(_load("gate", place, **options), prompts, 16) for place in ("cpu", device.type)]
    assert tokens[0] == tokens[1], "greedy tokens on the GPU are not the CPU's: no speed is worth printing"


def engine_line(
    device: torch.device,
    model: str,
    what: str,
    requests: int,
    shared: int,
    own: int,
    max_tokens: int,
    ceiling: float,
    goal: float,
) -> Line:
    """Output tokens per second of one workload, whole, after a small one to warm up."""
    is_gpu = device.type == "cuda"
    llm = _load(
        model,
        device.type,
        dtype="bfloat16" if is_gpu else "float32",
        kv_cache_memory_bytes=48 * 2**30 if is_gpu else 2**26,
        max_num_seqs=requests,
        max_num_batched_tokens=8192 if is_gpu else 64,
        max_model_len=shared + own + max_tokens,
    )
    _generate(llm, _prompts(model, min(requests, 8), shared, own, seed=1), max_tokens)
    prompts = _prompts(model, requests, shared, own)
    start = time.perf_counter()
    tokens = _generate(llm, prompts, max_tokens)
    elapsed = time.perf_counter() - start
    assert [len(row) for row in tokens] == [max_tokens] * requests
    rate = requests * max_tokens / elapsed
    return Line(f"{model}, {what}: fraction of the ceiling", rate, "tok/s", rate / ceiling, goal)


def _load(model: str, device: str, **options: Any) -> LLM:
    return LLM(str(_folder(model)), device=device, load_format="dummy", skip_tokenizer_init=True, **options)


def _folder(model: str) -> Path:
    folder: Path = ROOT / "out" / "bench" / f"{model}-config"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[model]), encoding="utf-8")
    return folder


def _prompts(model: str, requests: int, shared: int, own: int, seed: int = 0) -> list[list[int]]:
    """Token ids: a prefix that all share, then each row's own."""
    generator = torch.Generator().manual_seed(seed)
    vocab = CONFIGS[model]["vocab_size"]
    prefix = torch.randint(1, vocab, (shared,), generator=generator).tolist()
    return [prefix + torch.randint(1, vocab, (own,), generator=generator).tolist() for _ in range(requests)]


def _generate(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [list(output.outputs[0].token_ids) for output in outputs]
