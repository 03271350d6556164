"""Greedy output equals transformers' in float32, however the work is scheduled."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace.engine.config import EngineConfig, ModelConfig
from headrace.engine.engine import Engine
from headrace.engine.request import Request
from headrace.kernels.paged_attention import cpu, metadata
from headrace.kernels.paged_attention.shared_prefix import attend_shared_prefix

from .conftest import FAMILIES, NUM_NEW_TOKENS, Checkpoint
from .running import greedy_params, run_all, token_ids

MakeCheckpoint = Callable[[str], Checkpoint]


@dataclass(frozen=True)
class Schedule:
    """Engine options under which all prompts run together."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)


SCHEDULES = [
    Schedule("batched"),
    Schedule("chunked", {"max_num_batched_tokens": 13, "block_size": 8}),
    Schedule("blocks-of-32", {"block_size": 32}),
    Schedule("no-prefix-cache", {"enable_prefix_caching": False, "max_num_batched_tokens": 23}),
]


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest, checkpoint: MakeCheckpoint) -> Checkpoint:
    return checkpoint(request.param)


def load(checkpoint: Checkpoint, **options: Any) -> Engine:
    return Engine.from_pretrained(
        checkpoint.folder, EngineConfig(**{"num_gpu_blocks_override": 100, "max_model_len": 150, **options})
    )


def generate(engine: Engine, prompts: list[list[int]], prefix: str = "") -> list[list[int]]:
    requests = [
        Request(f"{prefix}{index}", prompt, greedy_params(NUM_NEW_TOKENS)) for index, prompt in enumerate(prompts)
    ]
    events = run_all(engine, requests)
    return [token_ids(events[request.request_id]) for request in requests]


def test_the_expected_outputs_are_varied_enough_to_compare(family):
    assert [len(answer) for answer in family.expected] == [NUM_NEW_TOKENS] * len(family.prompts)
    assert all(len(set(answer)) > 10 for answer in family.expected)


def test_each_prompt_alone(family):
    engine = load(family, enable_prefix_caching=False)
    for prompt, expected in zip(family.prompts, family.expected, strict=True):
        assert generate(engine, [prompt]) == [expected]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_prompts_together(family, schedule):
    assert generate(load(family, **schedule.options), family.prompts) == family.expected


@pytest.mark.parametrize("block_size", [8, 16])
def test_a_cached_prefix(family, block_size):
    engine = load(family, block_size=block_size)
    generate(engine, family.prompts[-1:])
    cached_before = engine.stats.num_computed_tokens
    events = run_all(engine, [Request("again", family.prompts[-1], greedy_params(NUM_NEW_TOKENS))])["again"]
    assert token_ids(events) == family.expected[-1]
    full_blocks = (len(family.prompts[-1]) - 1) // block_size
    assert events[-1].num_cached_tokens == full_blocks * block_size
    computed = engine.stats.num_computed_tokens - cached_before
    assert computed == len(family.prompts[-1]) - full_blocks * block_size + NUM_NEW_TOKENS - 1


def test_a_cached_prefix_of_another_prompt(family):
    """A prompt and its continuation: the blocks that hold generated tokens are found as well."""
    engine = load(family, block_size=8)
    prompt, expected = family.prompts[-1], family.expected[-1]
    generate(engine, [prompt])
    request = Request("longer", prompt + expected[:21], greedy_params(NUM_NEW_TOKENS - 21))
    events = run_all(engine, [request])["longer"]
    assert token_ids(events) == expected[21:]
    assert events[-1].num_cached_tokens > len(prompt)


def test_preempted_for_want_of_blocks(family):
    engine = load(family, block_size=8, num_gpu_blocks_override=20, max_num_batched_tokens=29)
    assert generate(engine, family.prompts) == family.expected
    assert engine.stats.num_preemptions > 0


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "apart"])
def test_attention_over_a_shared_prefix(family, monkeypatch, is_shared):
    """A prompt and its continuations run side by side, with the gate wide open and shut."""
    monkeypatch.setattr(metadata, "MIN_SPARED_TOKENS", 1 if is_shared else 10**9)
    num_sharing = []

    def attend(*arguments: Any) -> Any:
        num_sharing.append(len(arguments[3].blocks))
        return attend_shared_prefix(*arguments)

    monkeypatch.setattr(cpu, "attend_shared_prefix", attend)
    prompt, expected = family.prompts[-1], family.expected[-1]
    prompts = [prompt + expected[:length] for length in (0, 1, 5, 17)]
    answers = generate(load(family, block_size=8, max_num_batched_tokens=64), prompts)
    for length, answer in zip((0, 1, 5, 17), answers, strict=True):
        assert answer[: NUM_NEW_TOKENS - length] == expected[length:]
    has_full_attention = None in ModelConfig.from_pretrained(family.folder).sliding_windows
    assert (max(num_sharing, default=0) > 1) == (is_shared and has_full_attention)
