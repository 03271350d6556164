"""Log-probabilities of the prompt's tokens: the model's own, however the prompt was computed."""

from collections.abc import Sequence
from contextlib import suppress

import pytest
import torch

from headrace.engine.config import EngineConfig
from headrace.engine.llm import LLM
from headrace.engine.logprobs import Logprob, TokenLogprobs
from headrace.engine.offline.outputs import RequestOutput
from headrace.engine.request import Request
from headrace.engine.sampling import prompt_reader
from headrace.engine.sampling.sampler import LogprobQuery, token_logprobs
from headrace.engine.sampling_params import SamplingParams

from ..fakes import FakeRunner, fake_engine
from ..likeliest import assert_likeliest

PROMPT = "The prompt's own tokens are scored, one after the other. " * 2
ASKING = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3)
PLAIN = SamplingParams(temperature=0, max_tokens=2)


@pytest.fixture
def make_llm(chat_folder):
    return lambda **options: LLM(chat_folder, **{"num_gpu_blocks_override": 64, **options})


def check(output: RequestOutput, model, num_top: int) -> None:
    """Against transformers' logits over the whole prompt."""
    ids = output.prompt_token_ids
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(ids)
    assert output.prompt_logprobs[0] is None
    for token, found, row in zip(ids[1:], output.prompt_logprobs[1:], expected[:-1], strict=True):
        assert found is not None
        assert_likeliest(found, token, row, num_top)


@pytest.mark.parametrize("num_top", [0, 1, 5, 400])
def test_they_are_transformers(make_llm, chat_model, num_top):
    prompts = [PROMPT, "x", PROMPT[:20]]
    params = SamplingParams(max_tokens=1, prompt_logprobs=num_top)
    for output in make_llm().generate(prompts, params):
        check(output, chat_model, num_top)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_chunked_prefill_gives_the_same(make_llm, chat_model, chunk):
    llm = make_llm(max_num_batched_tokens=chunk, max_num_seqs=2)
    for output in llm.generate([PROMPT, "another " + PROMPT[:30]], ASKING):
        check(output, chat_model, 3)


def test_a_cached_prefix_is_computed_afresh_and_only_for_those_who_ask(make_llm, chat_model):
    llm = make_llm()
    llm.generate(PROMPT, PLAIN)
    asking, plain = llm.generate([PROMPT, PROMPT], [ASKING, PLAIN])
    check(asking, chat_model, 3)
    assert asking.num_cached_tokens == 0
    assert plain.num_cached_tokens > 0
    assert plain.prompt_logprobs is None
    assert asking.outputs[0].token_ids == plain.outputs[0].token_ids


def test_preemption_loses_none(make_llm, chat_model):
    """Two sequences outgrow the memory, so one starts over; a third is preempted while its prompt is computed."""
    llm = make_llm(num_gpu_blocks_override=16, max_model_len=256, max_num_batched_tokens=24)
    params = SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, prompt_logprobs=3)
    outputs = llm.generate([PROMPT, "b" + PROMPT[:50], "c" + PROMPT[:70]], params)
    assert llm.engine.stats.num_preemptions > 0
    for output in outputs:
        check(output, chat_model, 3)


def test_a_slice_of_logits_at_a_time_gives_the_same(make_llm, chat_model, monkeypatch):
    rows: list[int] = []

    def counted(
        logits: torch.Tensor, tokens: Sequence[int], wanted: Sequence[LogprobQuery]
    ) -> list[dict[int, Logprob]]:
        rows.append(len(logits))
        return token_logprobs(logits, tokens, wanted)

    monkeypatch.setattr(prompt_reader, "_SLICE_BYTES", 10 * 307 * 4)
    monkeypatch.setattr(prompt_reader, "token_logprobs", counted)
    (output,) = make_llm().generate([PROMPT], ASKING)
    check(output, chat_model, 3)
    assert max(rows) == 10
    assert sum(rows) == len(output.prompt_token_ids) - 1


def test_several_answers_come_with_the_prompts_once(make_llm, chat_model):
    params = SamplingParams(n=3, max_tokens=4, prompt_logprobs=3, seed=1)
    llm = make_llm()
    (output,) = llm.generate([PROMPT], params)
    check(output, chat_model, 3)
    assert len(output.outputs) == 3
    plain = make_llm().generate([PROMPT], SamplingParams(n=3, max_tokens=4, seed=1))[0]
    assert [each.token_ids for each in output.outputs] == [each.token_ids for each in plain.outputs]


def test_a_step_that_failed_is_computed_again():
    """What was read of the prompt before is read again."""
    prompt = [1, 2, 3, 4, 5, 6, 7]
    request = Request("r", prompt, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))

    def entries(fail_at: int | None) -> tuple[TokenLogprobs | None, ...] | None:
        runner = FakeRunner(num_blocks=32, block_size=2)
        engine = fake_engine(runner, EngineConfig(block_size=2, max_num_batched_tokens=3))
        engine.add(request)
        found = None
        for step in range(12):
            runner.fail_next = KeyboardInterrupt if step == fail_at else None
            with suppress(KeyboardInterrupt):
                found = next((event.prompt_logprobs for event in engine.step() if event.prompt_logprobs), found)
        return found

    undisturbed = entries(None)
    assert undisturbed is not None
    assert [None if each is None else list(each) for each in undisturbed] == [None, *([token] for token in prompt[1:])]
    assert entries(1) == entries(2) == undisturbed
