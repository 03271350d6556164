"""Greedy tokens of small models on the GPU against the CPU's, for `gpu.py`: the engine's golden tests in a minute.

The CPU computes whole prompts and shares nothing; the GPU does all that is done for speed or room at once: CUDA graphs,
steps ahead, chunks of prompts beside decodes, prefixes that are cached and read once for all, and sequences that are
preempted, to be computed again or swapped to the host and back.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from gpu_engine import CONFIGS, Workload, checkpoint_folder, open_model
from gpu_golden_models import GOLDEN
from gpu_kernels import assert_near
from torch import Tensor

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.execution import model_runner
from headrace.engine.kv_cache.swap import PreemptionCosts
from headrace.engine.llm import LLM
from headrace.engine.offline.outputs import RequestOutput
from headrace.engine.sampling_params import SamplingParams
from headrace.kernels.paged_attention import planning

MODELS = (*GOLDEN, "gate latents", "gate states")
_DRY_MODELS = ("golden caps", "golden sinks")
_SWAPPED = "golden biases"
_IN_BFLOAT16, _DRY_IN_BFLOAT16 = ("golden biases", "golden caps"), ("golden biases",)
_SHARED_TOKENS = 70
_CONTEXT = 160
_PLAIN = {"dtype": "float32", "max_model_len": _CONTEXT, "num_gpu_blocks_override": 200, "enable_prefix_caching": False}
# Steps of more tokens than the largest graph's are computed without one.
_FEATURES = {
    "dtype": "float32",
    "max_model_len": _CONTEXT,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
    "cuda_graph_sizes": (1, 4, 8, 32),
    "async_scheduling": True,
}
# So few that sequences are preempted; where every layer has a window, each needs fewer.
_NUM_BLOCKS, _NUM_BLOCKS_IN_WINDOWS = 20, 14
_SWAPS_COST_NOTHING = PreemptionCosts(seconds_per_token=1.0, seconds_per_byte=0.0, seconds_per_swap=0.0)
# Logits that are nearer to each other may change places, and those of one token differ by no more.
_NEAR, _LOGPROB_TOLERANCE = 1e-4, 1e-3
# Twice and a half as far as bfloat16's logits were from float32's on a CPU.
_BFLOAT16_TOLERANCE = 4e-2


def golden_checks(device: torch.device, is_dry: bool) -> dict[str, Callable[[], str]]:
    """By name. Each returns what there is to say of it, and raises `AssertionError` where tokens are others."""
    models, rounded = (_DRY_MODELS, _DRY_IN_BFLOAT16) if is_dry else (MODELS, _IN_BFLOAT16)
    checks = {
        **{name: partial(check_golden, name, device) for name in models},
        f"{_SWAPPED}, swapped": partial(check_golden, _SWAPPED, device, is_swapped=True),
        **{f"{name} in bfloat16": partial(check_bfloat16, name, device) for name in rounded},
    }
    return {name.removeprefix("golden "): check for name, check in checks.items()}


def check_golden(model: str, device: torch.device, is_swapped: bool = False) -> str:
    """Greedy tokens are the CPU's, also of prompts that are asked again; then log-probabilities are too."""
    work, folder = golden_work(model), checkpoint_folder(model)
    expected = _answers(open_model(folder, "cpu", **_PLAIN), work, 2)
    has_windows_alone = None not in ModelConfig.from_pretrained(folder).sliding_windows
    num_blocks = _NUM_BLOCKS_IN_WINDOWS if has_windows_alone else _NUM_BLOCKS
    with ExitStack() as patches:
        patches.enter_context(patch.object(planning, "MIN_SHARED_TOKENS", ((2, 32),)))
        if is_swapped:
            # What models so small have to keep they compute faster than they could copy it.
            patches.enter_context(patch.object(model_runner, "preemption_costs", lambda *_: _SWAPS_COST_NOTHING))
        swap_space = 2**24 if is_swapped else 0
        options = {**_FEATURES, "num_gpu_blocks_override": num_blocks, "swap_space_bytes": swap_space}
        llm = open_model(folder, device.type, **options)
        first, again = _answers(llm, work, None), _answers(llm, work, 2)
    llm.engine.check()
    stats = llm.engine.stats
    assert (stats.num_swaps if is_swapped else stats.num_preemptions) > 0, "there were blocks enough for all sequences"
    assert has_windows_alone or any(each.num_cached_tokens for each in again), "no prompt was found in the cache"
    near = [place for found in (first, again) for place in places_of_ties(found, expected)]
    return f"apart where two logits are near: {', '.join(near)}" if near else ""


def check_bfloat16(model: str, device: torch.device) -> str:
    """The first token's logits are float32's on the CPU, as nearly as bfloat16 has them."""
    work, folder = golden_work(model), checkpoint_folder(model)
    options: dict[str, Any] = {"max_model_len": _CONTEXT, "num_gpu_blocks_override": 200}
    expected, found = (
        _first_logits(open_model(folder, place, dtype=dtype, **options), work)
        for place, dtype in (("cpu", "float32"), (device.type, "bfloat16"))
    )
    assert_near(found, expected, _BFLOAT16_TOLERANCE)
    return ""


def golden_work(model: str) -> Workload:
    """Prompts that share their beginning, of many lengths, and as many lengths of answers."""
    generator = torch.Generator().manual_seed(0)
    prefix, *own = (
        torch.randint(1, CONFIGS[model]["vocab_size"], (length,), generator=generator).tolist()
        for length in (_SHARED_TOKENS, *range(1, 41, 5))
    )
    return Workload([prefix + tokens for tokens in own], [20 + 5 * (row % 4) for row in range(len(own))])


def places_of_ties(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> list[str]:
    """Where answers part at two logits that are near each other: what follows is not compared.

    `expected` with log-probabilities. Raises `AssertionError` where they part elsewhere, or log-probabilities do.
    """
    ties = []
    for row, (one, other) in enumerate(zip(found, expected, strict=True)):
        tokens, logprobs = one.outputs[0].token_ids, one.outputs[0].logprobs
        wanted, likeliest = other.outputs[0].token_ids, other.outputs[0].logprobs or []
        for place, (token, best, likely) in enumerate(zip(tokens, wanted, likeliest, strict=True)):
            where = f"token {place} of prompt {row}"
            if token != best:
                gap = likely[best].logprob - min(each.logprob for each in likely.values())
                is_tie = token in likely and gap < _NEAR
                assert is_tie, f"{where} is {token}, and on the CPU {best}, whose lead is {gap:.2g}"
                ties.append(where)
                break
            apart = abs(logprobs[place][token].logprob - likely[token].logprob) if logprobs else 0.0
            assert apart < _LOGPROB_TOLERANCE, f"{where} has a log-probability that is off by {apart:.2g}"
    return ties


def _answers(llm: LLM, work: Workload, logprobs: int | None) -> list[RequestOutput]:
    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, logprobs=logprobs)
        for length in work.max_tokens
    ]
    return llm.generate([{"prompt_token_ids": prompt} for prompt in work.prompts], params, use_tqdm=False)


def _first_logits(llm: LLM, work: Workload) -> Tensor:
    """[prompts, vocabulary] float32, less what log-probabilities say of all tokens alike."""
    answers = _answers(llm, Workload(work.prompts, [1] * len(work.prompts)), -1)
    firsts = [(answer.outputs[0].logprobs or [])[0] for answer in answers]
    logprobs = torch.tensor([[each.logprob for _, each in sorted(first.items())] for first in firsts])
    return logprobs - logprobs.mean(dim=-1, keepdim=True)
