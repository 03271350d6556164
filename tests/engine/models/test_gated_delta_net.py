"""Qwen3-Next and Qwen3.5, of whose layers most have a state: greedy output equals transformers' in float32."""

import pytest

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.request import Request

from ..families import VOCAB_SIZE, WITH_STATES
from ..running import greedy_params, run_all, token_ids
from .test_further_families import NUM_TOKENS, is_greedy

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
