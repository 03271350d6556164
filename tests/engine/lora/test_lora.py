"""Rows of several LoRA adapters and of the base model in one batch answer as transformers does with each merged."""

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.execution.batch import Batch
from headrace.engine.request import Request

from ..running import greedy_params, run_all, token_ids
from .conftest import NUM_TOKENS, Adapted

FAMILIES = [
    *("llama", "qwen2-yarn", "phi3-window", "gemma2", "gemma4", "gemma4-small", "llama-bias-tied-rope3", "ernie"),
    "deepseek-v3",
]
SCHEDULES: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 13, "block_size": 8},
    "one-step-ahead": {"async_scheduling": True, "max_num_batched_tokens": 29, "block_size": 8},
    "preempted": {"num_gpu_blocks_override": 24, "block_size": 8},
    "guessing": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 3,
            "prompt_lookup_min": 1,
            "disable_by_batch_size": 64,
        }
    },
    "drafting": {"speculative_config": {"num_speculative_tokens": 3, "disable_by_batch_size": 64}},
    "no-prefix-cache": {"enable_prefix_caching": False},
}


def load(model: Adapted, **options: Any) -> Engine:
    known = {"num_gpu_blocks_override": 200, "max_model_len": 150, "enable_lora": True, **options}
    return Engine.from_pretrained(model.folder, EngineConfig(**known))


def requests(model: Adapted, prefix: str = "") -> list[Request]:
    """Every prompt with every adapter, those of one prompt after each other."""
    return [
        Request(f"{prefix}{lora}/{prompt}", tokens, greedy_params(NUM_TOKENS), lora_request=model.loras[lora])
        for prompt, tokens in enumerate(model.prompts)
        for lora in range(len(model.loras))
    ]


def assert_greedy(engine: Engine, model: Adapted, prefix: str = "") -> None:
    events = run_all(engine, requests(model, prefix))
    answers = [
        [token_ids(events[f"{prefix}{lora}/{prompt}"]) for prompt in range(len(model.prompts))]
        for lora in range(len(model.loras))
    ]
    # Each adapter says something of its own, or a mistaken one would pass.
    assert len({str(each) for each in answers}) == len(model.loras)
    for lora, of_prompts in enumerate(answers):
        assert all(model.is_greedy(lora, prompt, answer) for prompt, answer in enumerate(of_prompts))


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_all_adapters_in_one_batch(adapted, family):
    model = adapted(family)
    engine = load(model)
    assert_greedy(engine, model)
    # Again, from the cache of prefixes: of the right adapter, or the answers would differ.
    before = engine.stats.num_computed_tokens
    assert_greedy(engine, model, "again")
    assert engine.stats.num_computed_tokens - before < before


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 13, "block_size": 8}], ids=["batched", "chunked"])
@pytest.mark.parametrize("family", ["qwen3.5", "falcon-h1", "olmo-hybrid", "lfm2"])
def test_layers_with_states(adapted, family, options):
    model = adapted(family)
    assert_greedy(load(model, **options), model)


@pytest.mark.parametrize("schedule", list(SCHEDULES))
def test_however_the_work_is_scheduled(adapted, schedule):
    model = adapted("llama")
    options = SCHEDULES[schedule]
    if schedule == "drafting":
        # The model that the adapters are for.
        options = {"speculative_config": {**options["speculative_config"], "model": str(model.folder)}}
    engine = load(model, **options)
    assert_greedy(engine, model)
    assert (engine.stats.num_preemptions > 0) == (schedule == "preempted")
    assert (engine.stats.num_draft_tokens > 0) == (schedule in ("guessing", "drafting"))


def test_graphs_compute_what_has_no_adapter(adapted, monkeypatch):
    """They know of none: such a step is computed eagerly."""
    model = adapted("llama")
    engine = load(model)
    runner: Any = engine._runner
    computed = []

    class Graphs:
        def forward(self, batch: Batch) -> Tensor:
            assert batch.adapters is None
            computed.append(batch)
            return runner._forward(replace(batch, last_tokens=None))

    monkeypatch.setattr(runner, "_graphs", Graphs())
    assert_greedy(engine, model)
    assert not computed
    run_all(engine, [Request("base", model.prompts[0], greedy_params(4))])
    assert len(computed) == 4


def test_no_adapter_finds_what_another_has_cached(adapted):
    model = adapted("llama")
    engine = load(model)
    prompt = model.prompts[-1]
    cached: dict[str, list[int]] = {}
    for lora in [*model.loras, *model.loras]:
        name = lora.lora_name if lora else "base"
        request = Request("it", prompt, greedy_params(2), lora_request=lora)
        cached.setdefault(name, []).append(run_all(engine, [request])["it"][-1].num_cached_tokens)
    full_blocks = (len(prompt) - 1) // 16 * 16
    assert set(map(tuple, cached.values())) == {(0, full_blocks)}
