"""Greedy output equals transformers' in float32, however the work is scheduled."""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.execution import model_runner
from headrace.engine.kv_cache.swap import PreemptionCosts
from headrace.engine.request import FinishReason, Request
from headrace.kernels import paged_attention
from headrace.kernels.paged_attention import cpu, planning, prefix_groups
from headrace.kernels.paged_attention.shared_prefix import attend_shared_prefix

from .conftest import NUM_NEW_TOKENS, Checkpoint
from .families import FAMILIES, FURTHER, VOCAB_SIZE
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
    Schedule("one-step-ahead", {"async_scheduling": True, "max_num_batched_tokens": 13, "block_size": 8}),
    Schedule("blocks-of-32", {"block_size": 32}),
    Schedule("no-prefix-cache", {"enable_prefix_caching": False, "max_num_batched_tokens": 23}),
]


# What a schedule can do to a family is in how its layers use the cache: all of it, a window in every layer or in every
# other one, with caps on scores or with sinks, with heads of two sizes that later layers read too, or as latents; and
# experts, who get other rows in each step.
@pytest.fixture(params=["llama", "mistral-window", "gemma2", "gemma4-small", "gpt-oss", "deepseek-v3"])
def family(request: pytest.FixtureRequest, checkpoint: MakeCheckpoint) -> Checkpoint:
    return checkpoint(request.param)


@pytest.fixture
def always_swap(monkeypatch) -> None:
    """Models so small compute their KV faster than they could copy it."""
    costs = PreemptionCosts(seconds_per_token=1.0, seconds_per_byte=0.0, seconds_per_swap=0.0)
    monkeypatch.setattr(model_runner, "preemption_costs", lambda *_: costs)


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


def windows(checkpoint: Checkpoint) -> Sequence[int | None]:
    return ModelConfig.from_pretrained(checkpoint.folder).sliding_windows


def copies_to_preempt(checkpoint: Checkpoint) -> int:
    """How often twenty blocks of eight are too few for the prompts: what slides out of every layer makes room."""
    return 1 if None in windows(checkpoint) else 2


def generate_beside(engine: Engine, prompts: list[list[int]], prefix: str) -> list[list[int]]:
    """As `generate`, while a request that is to fail runs too."""
    answers: dict[str, list[int]] = {f"{prefix}{index}": [] for index in range(len(prompts))}
    for request_id, prompt in zip(answers, prompts, strict=True):
        engine.add(Request(request_id, prompt, greedy_params(NUM_NEW_TOKENS)))
    failed = []
    while engine.has_work:
        for event in engine.step():
            if event.finish_reason is FinishReason.ERROR:
                failed.append(event)
            else:
                answers[event.request_id] += event.new_token_ids
        engine.check()
    assert len(failed) == 1
    return list(answers.values())


@torch.inference_mode()
def is_greedy(model: Any, prompt: list[int], answer: list[int]) -> bool:
    """Whether an answer is what transformers gives, one likeliest token after the other."""
    logits = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]
    return bool(logits.argmax(-1).tolist() == answer)


@pytest.mark.parametrize("name", [*FAMILIES, *FURTHER])
def test_prompts_together_in_chunks_preempted_and_from_the_cache(checkpoint, name):
    made = checkpoint(name)
    engine = load(made, block_size=8, num_gpu_blocks_override=20, max_num_batched_tokens=29)
    prompts = made.prompts * copies_to_preempt(made)
    for turn in "first", "again":
        requests = [Request(f"{turn}{nth}", each, greedy_params(40)) for nth, each in enumerate(prompts)]
        events = run_all(engine, requests)
        answers = [token_ids(events[request.request_id]) for request in requests]
        assert all(len(set(answer)) > 10 for answer in answers)
        assert all(is_greedy(made.model, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True))
    assert engine.stats.num_preemptions > 0
    assert None not in windows(made) or events["again2"][-1].num_cached_tokens > 0


@pytest.mark.parametrize("name", [*FAMILIES, *FURTHER])
def test_a_prompt_alone(checkpoint, name):
    made = checkpoint(name)
    [answer] = generate(load(made, enable_prefix_caching=False), made.prompts[-1:])
    assert is_greedy(made.model, made.prompts[-1], answer)


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


def test_a_fork_has_a_copy_of_the_last_block(family):
    prompt, params = family.prompts[-1], greedy_params(NUM_NEW_TOKENS)
    assert len(prompt) % 16
    requests = [Request("first", prompt, params), Request("fork", prompt, params, fork_of="first")]
    events = run_all(load(family, block_size=16), requests)
    assert [token_ids(events[each.request_id]) for each in requests] == [family.expected[-1]] * 2


def test_preempted_for_want_of_blocks(family):
    engine = load(family, block_size=8, num_gpu_blocks_override=20, max_num_batched_tokens=29)
    copies = copies_to_preempt(family)
    assert generate(engine, family.prompts * copies) == family.expected * copies
    assert engine.stats.num_preemptions > 0


def test_preempted_by_swap(family, always_swap):
    engine = load(family, block_size=8, num_gpu_blocks_override=20, max_num_batched_tokens=29, swap_space_bytes=2**30)
    assert generate(engine, family.prompts * 2) == family.expected * 2
    assert engine.stats.num_swaps > 0


def test_beside_31_others(family):
    engine = load(family, num_gpu_blocks_override=300)
    generator = torch.Generator().manual_seed(3)
    for index in range(31):
        prompt = torch.randint(0, VOCAB_SIZE, (1 + 2 * index,), generator=generator).tolist()
        engine.add(Request(f"other{index}", prompt, greedy_params(1 + index % 16)))
    request = Request("asked", family.prompts[-1], greedy_params(NUM_NEW_TOKENS))
    engine.add(request)
    events = []
    while engine.has_work:
        events += [event for event in engine.step() if event.request_id == "asked"]
    assert token_ids(events) == family.expected[-1]


@pytest.mark.parametrize("chunk_size", range(1, 65))
def test_every_chunk_size(checkpoint, chunk_size):
    made = checkpoint("llama")
    engine = load(made, block_size=8, max_num_batched_tokens=chunk_size)
    events = run_all(engine, [Request("r", made.prompts[-1], greedy_params(8))])["r"]
    assert token_ids(events) == made.expected[-1][:8]


@pytest.mark.parametrize("swap_space_bytes", [0, 2**30])
def test_under_a_window_sequences_outgrow_the_memory(checkpoint, always_swap, swap_space_bytes):
    """Forty tokens of memory; the longest sequence comes to 125."""
    made = checkpoint("mistral-window")
    engine = load(
        made,
        block_size=8,
        num_gpu_blocks_override=5,
        max_num_batched_tokens=32,
        swap_space_bytes=swap_space_bytes,
    )
    assert generate(engine, made.prompts) == made.expected


def test_nan_does_not_spread(checkpoint, tmp_path):
    """A token whose embedding is NaN, first beside the others, then in blocks that they get afterwards."""
    made = checkpoint("llama")
    broken = max(set(range(VOCAB_SIZE)) - set(chain.from_iterable(made.prompts + made.expected)))
    folder = tmp_path / "broken"
    shutil.copytree(made.folder, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][broken] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    engine = load(replace(made, folder=folder), block_size=8, num_gpu_blocks_override=40)
    for turn in range(2):
        bad = Request(f"bad{turn}", [*made.prompts[1][:3], broken, *made.prompts[-1]], greedy_params(3))
        engine.add(bad)
        assert generate_beside(engine, made.prompts, f"{turn}/") == made.expected


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared", "apart"])
def test_attention_over_a_shared_prefix(family, monkeypatch, is_shared, device):
    """A prompt and its continuations run side by side, with the gate wide open and shut; on a CPU torch's attention."""
    monkeypatch.setattr(paged_attention, "takes_native", lambda *_: False)
    monkeypatch.setattr(prefix_groups, "MIN_SPARED_TOKENS", 1 if is_shared else 10**9)
    monkeypatch.setattr(planning, "MIN_SHARED_TOKENS", ((2, 16 if is_shared else 10**9),))
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
    if device.type == "cuda":
        # The plan of the CPU's attention is not made there; the GPU's is tested with its kernels.
        return
    assert (max(num_sharing, default=0) > 1) == (is_shared and None in windows(family))
