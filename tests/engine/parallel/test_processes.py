"""An engine whose model two processes share answers as one that has it alone, and ends with any of them.

They share its layers, or have some of them each.
"""

import os
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.errors import EngineDeadError
from headrace.engine.execution import model_runner
from headrace.engine.kv_cache.kv_memory import block_bytes, num_blocks_in
from headrace.engine.kv_cache.swap import PreemptionCosts
from headrace.engine.llm import LLM, TokensPrompt
from headrace.engine.parallel.parallel_runner import ParallelRunner
from headrace.engine.parallel.rank_processes import RankProcesses
from headrace.engine.request import FinishReason, Request
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.sharding.stages import stage_model

from ..running import greedy_params, run_all, token_ids
from .sharing import Way
from .small_models import write_model

OPTIONS: dict[str, Any] = {
    "num_gpu_blocks_override": 20,
    "block_size": 8,
    "max_model_len": 100,
    "max_num_batched_tokens": 64,
    "async_scheduling": True,
}
DRAWN = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=30, ignore_eos=True)
BROKEN = 300
PREFIX = [token % 300 for token in range(7, 400, 13)]


@pytest.fixture(scope="module", autouse=True)
def _always_swap() -> Iterator[None]:
    costs = PreemptionCosts(seconds_per_token=1.0, seconds_per_byte=0.0, seconds_per_swap=0.0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(model_runner, "preemption_costs", lambda *_: costs)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Of a model that one token's embedding is broken of."""
    folder = write_model(tmp_path_factory.mktemp("shared") / "qwen2", num_hidden_layers=3)
    weights = {slot.name: slot.stored() for slot in Way().load(ModelConfig.from_pretrained(folder)).weight_slots()}
    weights["model.embed_tokens.weight"][BROKEN] = float("nan")
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module", params=["tensor_parallel_size", "pipeline_parallel_size"])
def pair(folder, request) -> Iterator[Engine]:
    """Two processes share it: each of its layers, and their KV head, or two layers are here and one there."""
    engine = load(folder, **{request.param: 2})
    yield engine
    engine.close()
    assert all(rank.process.poll() is not None for rank in processes_of(engine)._ranks)


def load(folder: Path, **options: Any) -> Engine:
    return Engine.from_pretrained(folder, EngineConfig(**{**OPTIONS, "swap_space_bytes": 2**20, **options}))


def processes_of(engine: Engine) -> RankProcesses:
    assert isinstance(engine._runner, ParallelRunner)
    return engine._runner.processes


def requests(prefix: str) -> list[Request]:
    """Rows that share a prefix, greedy and sampled, one with log-probabilities of its prompt; more than have room."""
    drawn = [replace(DRAWN, seed=seed) for seed in range(4)]
    scored = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, prompt_logprobs=2, logprobs=1)
    params = [greedy_params(40), *drawn, scored, greedy_params(20)]
    return [Request(f"{prefix}{row}", [*PREFIX, row, 3 * row], each) for row, each in enumerate(params)]


def finish(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


def answers(engine: Engine, asked: list[Request]) -> dict[str, list[int]]:
    return {request_id: token_ids(events) for request_id, events in run_all(engine, asked).items()}


def test_rows_of_all_kinds(folder, pair):
    alone = load(folder)
    expected, events = run_all(alone, requests("first ")), run_all(pair, requests("first "))
    assert {name: token_ids(each) for name, each in events.items()} == {
        name: token_ids(each) for name, each in expected.items()
    }
    shown, wanted = (each["first 5"][-1].prompt_logprobs for each in (events, expected))
    assert [list(each or ()) for each in shown or ()] == [list(each or ()) for each in wanted or ()]
    # With what the first ones left in the cache.
    assert answers(pair, requests("again ")) == answers(alone, requests("again "))
    assert pair.stats == replace(alone.stats, waited_seconds=pair.stats.waited_seconds)
    assert pair.stats.num_swaps > 0


def test_a_row_that_fails_ends_alone(folder, pair):
    broken = Request("broken", [*PREFIX[:20], BROKEN, *PREFIX[:9]], greedy_params(4))
    whole = Request("whole", [*PREFIX[:20], 4], greedy_params(12))
    events = run_all(pair, [broken, whole])
    assert events["broken"][-1].finish_reason is FinishReason.ERROR
    # What it wrote is taken out of the blocks that others get.
    after = requests("after a broken one ")[:4]
    assert {"whole": token_ids(events["whole"]), **answers(pair, after)} == answers(load(folder), [whole, *after])


def test_blocks_are_copied_and_zeroed_on_all(folder, pair):
    alone = load(folder)
    samples = [
        Request(f"sample {seed}", PREFIX[:21], replace(DRAWN, seed=seed), fork_of="sample 0" if seed else None)
        for seed in range(3)
    ]
    assert answers(pair, samples) == answers(alone, samples)
    # What a cached prompt is answered with after its keys and values are zero.
    cached = [Request("before", PREFIX[:25], greedy_params(12))]
    before = answers(pair, cached), answers(alone, cached)
    for engine in (pair, alone):
        engine._runner.memory.zero(range(1, 21))
    zeroed = [Request("after", PREFIX[:25], greedy_params(12))]
    after = answers(pair, zeroed), answers(alone, zeroed)
    assert before[0]["before"] == before[1]["before"] != after[0]["after"] == after[1]["after"]


def test_ctrl_c_leaves_the_ranks_in_step(folder, pair, monkeypatch):
    ranks = pair._runner._ranks_told
    hear = ranks.hear
    cut_short: list[Tensor] = []

    def interrupted(x: Tensor) -> Tensor:
        monkeypatch.undo()
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            # The other rank hears of the step all the same, or this would wait for it for ever.
            cut_short.append(x)
        return hear(x)

    monkeypatch.setattr(ranks, "hear", interrupted)
    # None of what is cached by now, which may be zeros.
    request = Request("interrupted", PREFIX[::-1], greedy_params(12))
    pair.add(request)
    with pytest.raises(KeyboardInterrupt):
        pair.step()
    assert not cut_short
    found = [event for _ in iter(lambda: pair.has_work, False) for event in pair.step()]
    assert token_ids(found) == answers(load(folder), [request])["interrupted"]


def test_offline_with_stages_that_verify_guesses(folder):
    """The first step takes two parts, of which the second reads a prefix that the first computes.

    There are as many blocks as the first stage has memory for, which has more layers.
    """
    options: dict[str, Any] = {
        **OPTIONS,
        "num_gpu_blocks_override": None,
        "kv_cache_memory_bytes": 2**20,
        "max_model_len": 120,
        "max_num_batched_tokens": 160,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    }
    prompts = [TokensPrompt(prompt_token_ids=[*PREFIX, *PREFIX, row, *PREFIX]) for row in range(3)]
    alone, stages = (LLM(folder, skip_tokenizer_init=True, pipeline_parallel_size=size, **options) for size in (1, 2))
    answers = [
        [each.outputs[0].token_ids for each in llm.generate(prompts, greedy_params(20))] for llm in (alone, stages)
    ]
    stages.engine.close()
    assert answers[1] == answers[0]
    first = stage_model(ModelConfig.from_pretrained(folder), 0, 2)
    num_blocks = num_blocks_in(2**20, first, OPTIONS["block_size"], torch.float32)
    stats = replace(alone.engine.stats, num_blocks=num_blocks, num_available_blocks=num_blocks)
    assert stages.engine.stats == replace(stats, waited_seconds=stages.engine.stats.waited_seconds)
    assert stats.num_accepted_tokens > 0
    assert stages.engine._runner.memory.block_bytes == block_bytes(first, OPTIONS["block_size"], torch.float32)


# The last one here: what is left of the pair is of no use to others.
def test_a_rank_that_is_killed_ends_the_engine(pair):
    engine = pair
    told = threading.Event()
    engine.call_when_dead(lambda _: told.set())
    engine.add(Request("cut short", PREFIX, greedy_params(40)))
    engine.step()
    process = processes_of(engine)._ranks[0].process
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=r"rank 1 \(process \d+\) was killed by SIGKILL"):
        finish(engine)
    assert told.wait(10)
    with pytest.raises(EngineDeadError):
        engine.step()
    engine.close()


def test_the_others_write_what_they_are_at(folder, capfd):
    engine = load(folder, tensor_parallel_size=2)
    try:
        engine.show_others()
    finally:
        engine.close()
    assert re.search(r"Current thread .*\n(?:.*\n)*.*rank_process.py.* in _follow", capfd.readouterr().err)
