"""The engine's part of `gpu.py`: its tokens against the CPU's, and its speed on shared prompts."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_golden_models import GOLDEN
from report import ROOT
from safetensors.torch import save_file
from shapes import SHAPES

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.llm import LLM
from headrace.engine.models import load_model
from headrace.engine.sampling_params import SamplingParams

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
QWEN3_0_6B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
}
FP8_SCHEME = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_PLAIN = {
    "llama-3-8b": LLAMA_3_8B,
    "qwen3-0.6b": QWEN3_0_6B,
    **{name: shape.config for name, shape in SHAPES.items()},
    # Three layers with states and one that attends.
    "gate states": {
        **SHAPES["M3"].config,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "layer_types": SHAPES["M3"].config["layer_types"][:4],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "vocab_size": 4096,
        "max_position_embeddings": 1024,
    },
    # DeepSeek-V3's attention with a few heads, and its experts in groups.
    "gate latents": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_act": "silu",
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "bfloat16",
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "vocab_size": 4096,
        "max_position_embeddings": 1024,
    },
}
CONFIGS: dict[str, dict[str, Any]] = {
    **_PLAIN,
    **GOLDEN,
    **{f"{name} fp8": {**_PLAIN[name], "quantization_config": FP8_SCHEME} for name in ("gate", "llama-3-8b")},
}


# After so many no further round begins: on a slower GPU one is enough.
_ROUNDS_SECONDS = 12
# Workloads of the same lengths that have no token in common at the same place: one to warm up with, and some to time.
MAX_VARIANTS = 8


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, and how many tokens each is answered with."""

    prompts: list[list[int]]
    max_tokens: list[int]

    @classmethod
    def shared(cls, model: str, requests: int, shared: int, own: int, max_tokens: int, seed: int = 0) -> "Workload":
        """A prefix that all share, then each row's own."""
        generator = torch.Generator().manual_seed(seed)
        vocab = CONFIGS[model]["vocab_size"]
        prefix = torch.randint(MAX_VARIANTS, vocab, (shared,), generator=generator).tolist()
        own_tokens = torch.randint(MAX_VARIANTS, vocab, (requests, own), generator=generator).tolist()
        return cls([prefix + tokens for tokens in own_tokens], [max_tokens] * requests)

    @classmethod
    def uniform(cls, model: str, requests: int, least: int, most: int, seed: int = 0) -> "Workload":
        """nano-vllm's: lengths of prompts and answers drawn evenly, nothing shared."""
        generator = torch.Generator().manual_seed(seed)
        lengths, answers = torch.randint(least, most + 1, (2, requests), generator=generator).tolist()
        vocab = CONFIGS[model]["vocab_size"]
        prompts = [torch.randint(MAX_VARIANTS, vocab, (length,), generator=generator).tolist() for length in lengths]
        return cls(prompts, answers)

    def with_other_tokens(self, variant: int = 1) -> "Workload":
        """The same lengths, and the same tokens shared, but none of them what they were: no cache helps with it."""
        assert variant <= MAX_VARIANTS
        return Workload([[token - variant for token in prompt] for prompt in self.prompts], self.max_tokens)

    @property
    def num_output_tokens(self) -> int:
        return sum(self.max_tokens)

    @property
    def longest(self) -> int:
        return max(len(prompt) + length for prompt, length in zip(self.prompts, self.max_tokens, strict=True))


def check_engine(device: torch.device, model: str = "gate") -> None:
    """Greedy tokens of a small float32 model are the same on the device and the CPU. Raises `AssertionError`."""
    work = Workload.shared(model, 6, 64, 9, 16)
    options: dict[str, Any] = {"dtype": "float32", "num_gpu_blocks_override": 200, "max_model_len": 256}
    folder = checkpoint_folder(model)
    tokens = [generate(open_model(folder, place, **options), work) for place in ("cpu", device.type)]
    assert tokens[0] == tokens[1], "greedy tokens on the GPU are not the CPU's: no speed is worth printing"


def load(model: str, device: str, **options: Any) -> LLM:
    return open_model(config_folder(model), device, load_format="dummy", **options)


def open_model(folder: Path, device: str, **options: Any) -> LLM:
    return LLM(str(folder), device=device, skip_tokenizer_init=True, **options)


def load_for(model: str, device: torch.device, workloads: Sequence[Workload], **options: Any) -> LLM:
    """A model with room for any of the workloads at once: a GPU's memory is the engine's to share out."""
    is_gpu = device.type == "cuda"
    return load(
        model,
        device.type,
        **{
            "dtype": "bfloat16" if is_gpu else "float32",
            **({} if is_gpu else {"kv_cache_memory_bytes": 2**26}),
            "max_num_seqs": max(len(work.prompts) for work in workloads),
            "max_num_batched_tokens": 8192 if is_gpu else 64,
            "max_model_len": max(work.longest for work in workloads),
            **options,
        },
    )


def checkpoint_folder(model: str) -> Path:
    """A folder with the model's `config.json` and random weights, the same ones on whatever device they are loaded."""
    folder = config_folder(model, "checkpoint")
    options = EngineConfig(load_format="dummy")
    drawn = load_model(ModelConfig.from_pretrained(folder), options, torch.float32, torch.device("cpu"))
    tensors = {slot.name: slot.stored() for slot in drawn.weight_slots()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def config_folder(model: str, kind: str = "config") -> Path:
    """A folder with the model's `config.json` alone."""
    folder: Path = ROOT / "out" / "bench" / f"{model.replace(' ', '-')}-{kind}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[model]), encoding="utf-8")
    return folder


def output_rates(llm: LLM, work: Workload, rounds: int) -> list[float]:
    """Output tokens per second of up to so many workloads like this one, after one to warm up.

    A graph is captured, and a kernel compiled, when it is first wanted: both are done once for a job of many hours.
    """
    generate(llm, work)
    rates: list[float] = []
    end = time.monotonic() + _ROUNDS_SECONDS
    while not rates or (len(rates) < rounds and time.monotonic() < end):
        rates.append(_output_rate(llm, work.with_other_tokens(len(rates) + 1)))
    return rates


def _output_rate(llm: LLM, work: Workload) -> float:
    start = time.perf_counter()
    tokens = generate(llm, work)
    elapsed = time.perf_counter() - start
    assert [len(row) for row in tokens] == work.max_tokens
    return work.num_output_tokens / elapsed


def generate(llm: LLM, work: Workload) -> list[list[int]]:
    of_length = {each: SamplingParams(temperature=0, max_tokens=each, ignore_eos=True) for each in set(work.max_tokens)}
    params = [of_length[length] for length in work.max_tokens]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in work.prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
