"""Families of whose layers most have a state: greedy output equals transformers' in float32."""

from dataclasses import replace
from pathlib import Path

import pytest

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.errors import ConfigError
from headrace.engine.request import Request
from headrace.engine.sampling_params import SamplingParams

from ..families import VOCAB_SIZE, WITH_STATES
from ..running import greedy_params, run_all, token_ids
from ..test_golden import is_greedy

NUM_TOKENS = 40

OPTIONS = EngineConfig(block_size=8, num_gpu_blocks_override=100)
SHARED = [(7 * place * place + 3) % VOCAB_SIZE for place in range(75)]
OWN = [[(place * place + 11 * nth) % VOCAB_SIZE for place in range(5 + 9 * nth)] for nth in range(5)]


@pytest.mark.parametrize("name", WITH_STATES)
def test_prompts_together_in_chunks_and_preempted(checkpoint, name):
    made = checkpoint(name)
    options = EngineConfig(num_gpu_blocks_override=26, max_model_len=150, block_size=8, max_num_batched_tokens=29)
    engine = Engine.from_pretrained(made.folder, options)
    prompts = made.prompts * 2
    requests = [Request(f"{nth}", prompt, greedy_params(NUM_TOKENS)) for nth, prompt in enumerate(prompts)]
    events = run_all(engine, requests)
    for nth, prompt in enumerate(prompts):
        answer = token_ids(events[str(nth)])
        assert is_greedy(made.model, prompt, answer)
        assert len(set(answer)) > 8
    assert engine.stats.num_preemptions > 0


@pytest.mark.parametrize("name", WITH_STATES)
def test_a_shared_prompt_is_computed_once(checkpoint, name):
    made = checkpoint(name)
    engine = Engine.from_pretrained(made.folder, EngineConfig(block_size=8, num_gpu_blocks_override=100))
    requests = [Request(f"{nth}", SHARED + own, greedy_params(NUM_TOKENS)) for nth, own in enumerate(OWN)]
    events = run_all(engine, requests)
    for request in requests:
        assert is_greedy(made.model, list(request.prompt_token_ids), token_ids(events[request.request_id]))
    cached = [events[request.request_id][-1].num_cached_tokens for request in requests]
    assert cached == [0, 72, 72, 72, 72]


@pytest.mark.parametrize(
    "options",
    [{"async_scheduling": True, "max_num_batched_tokens": 40}, {"max_num_seqs": 2}, {"enable_prefix_caching": False}],
    ids=["one-step-ahead", "two-at-a-time", "no-prefix-cache"],
)
def test_however_the_work_is_scheduled(checkpoint, options):
    made = checkpoint("qwen3.5")
    engine = Engine.from_pretrained(made.folder, EngineConfig(block_size=8, num_gpu_blocks_override=100, **options))
    requests = [Request(f"{nth}", SHARED + own, greedy_params(NUM_TOKENS)) for nth, own in enumerate(OWN)]
    events = run_all(engine, requests)
    for request in requests:
        assert is_greedy(made.model, list(request.prompt_token_ids), token_ids(events[request.request_id]))


def test_prompts_of_which_some_share_more(checkpoint):
    """Two groups that begin alike: each part of a prompt that others have too is computed once, in whatever order."""
    made = checkpoint("qwen3.5")
    engine = Engine.from_pretrained(made.folder, EngineConfig(block_size=8, num_gpu_blocks_override=200))
    groups = [SHARED[:48] + [(nth * 31 + place) % VOCAB_SIZE for place in range(40)] for nth in range(2)]
    prompts = [groups[nth % 2] + [nth] * 9 for nth in range(8)]
    for group in groups:
        engine.expect_prefix(group, 4)
    requests = [Request(f"{nth}", prompt, greedy_params(4)) for nth, prompt in enumerate(prompts)]
    events = run_all(engine, requests)
    assert [events[str(nth)][-1].num_cached_tokens for nth in range(8)] == [0, 48, *[88] * 6]


@pytest.mark.parametrize("name", WITH_STATES)
def test_the_next_turn_goes_on_near_the_end_of_the_last_one(checkpoint, name):
    """A template that opens the answer with two tokens, and leaves them out of the next turn's prompt."""
    made, opening = checkpoint(name), [5, 6]
    engine = Engine.from_pretrained(made.folder, OPTIONS)
    history, cached = SHARED, []
    for nth, own in enumerate(OWN[:4]):
        prompt = [*history, *own, *opening]
        request = Request(str(nth), prompt, greedy_params(20), is_conversation=True)
        events = run_all(engine, [request])[request.request_id]
        assert is_greedy(made.model, prompt, token_ids(events))
        cached.append(events[-1].num_cached_tokens)
        history = [*history, *own, *token_ids(events)]
    # Of prompts of 82, 116 and 159 tokens the whole blocks, up to 8 before their ends.
    assert cached == [0, 72, 104, 144]


def test_samples_go_on_from_the_state_of_their_prompt(checkpoint):
    made = checkpoint("qwen3.5")
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=20, ignore_eos=True) for seed in range(4)]
    apart = [answer_of(made.folder, [Request("0", SHARED, each)])["0"] for each in params]
    assert len(set(map(tuple, apart))) == 4
    forks = [Request(str(seed), SHARED, each, fork_of="0" if seed else None) for seed, each in enumerate(params)]
    engine = Engine.from_pretrained(made.folder, OPTIONS)
    together = run_all(engine, forks)
    assert [token_ids(together[str(seed)]) for seed in range(4)] == apart
    # The prompt once, and of the four answers all but their last tokens.
    assert engine.stats.num_computed_tokens == len(SHARED) + 4 * 19


def test_what_choices_have_in_common_with_their_prompt_is_computed_once(checkpoint):
    made = checkpoint("qwen3.5")
    choices = ((5, 6, 7), (5, 6, 8), (5, 9), (11, 12))
    asked = Request("0", SHARED, SamplingParams(temperature=0, choices=["a", "b", "c", "d"]), choices)
    expected = run_all(Engine.from_pretrained(made.folder, replace(OPTIONS, enable_prefix_caching=False)), [asked])
    engine = Engine.from_pretrained(made.folder, OPTIONS)
    event = run_all(engine, [asked])["0"][-1]
    assert event.choice_probabilities == pytest.approx(expected["0"][-1].choice_probabilities, rel=1e-4)
    # 75 tokens of the prompt; at two further nodes 1 and 2 of the choices', after the 72 of the prompt's blocks.
    assert engine.stats.num_computed_tokens == 75 + (3 + 1) + (3 + 2)


def answer_of(folder: Path, requests: list[Request]) -> dict[str, list[int]]:
    events = run_all(Engine.from_pretrained(folder, OPTIONS), requests)
    return {name: token_ids(each) for name, each in events.items()}


def test_what_does_not_go_with_states_is_refused(checkpoint):
    folder = checkpoint("qwen3.5").folder
    with pytest.raises(ConfigError, match=r"speculative_config is not supported with .*: its layers have states"):
        Engine.from_pretrained(folder, EngineConfig(speculative_config={"num_speculative_tokens": 3}))
