"""Several answers to a prompt, and log-probabilities."""

import json
from collections.abc import Mapping
from shutil import copytree
from typing import Any

import pytest
import torch

from headrace.engine.errors import InvalidRequestError
from headrace.engine.llm import LLM
from headrace.engine.logprobs import Logprob
from headrace.engine.offline.outputs import CompletionOutput
from headrace.engine.request import Request
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.structured.structured_outputs import StructuredOutputsParams

from ..families import VOCAB_SIZE
from ..likeliest import assert_likeliest

PROMPT = "You are asked for several answers to one prompt. " * 3


@pytest.fixture
def llm(chat_folder) -> LLM:
    return LLM(chat_folder, num_gpu_blocks_override=128)


def answers(llm: LLM, params: SamplingParams, prompt: str = PROMPT) -> list[CompletionOutput]:
    return llm.generate(prompt, params)[0].outputs


@pytest.mark.parametrize("seed", [None, 7])
def test_n_answers_differ_and_the_first_is_the_one_without_n(chat_folder, seed):
    def outputs(n: int, max_num_seqs: int) -> list[CompletionOutput]:
        llm = LLM(chat_folder, num_gpu_blocks_override=128, max_num_seqs=max_num_seqs)
        return answers(llm, SamplingParams(n=n, seed=seed, max_tokens=10, ignore_eos=True))

    four = outputs(4, 8)
    assert [output.index for output in four] == [0, 1, 2, 3]
    assert len({output.token_ids for output in four}) == 4
    assert outputs(4, 1) == four
    assert outputs(3, 8) == four[:3]
    assert outputs(1, 8) == four[:1]


def test_samples_share_the_prompts_blocks_and_compute_them_once(llm):
    params = SamplingParams(n=6, max_tokens=1)
    (output,) = llm.generate(PROMPT, params)
    length = len(output.prompt_token_ids)
    assert llm.engine.stats.num_computed_tokens == length
    assert output.num_cached_tokens == 0
    assert llm.generate(PROMPT, params)[0].num_cached_tokens == (length - 1) // 16 * 16


def test_each_prompt_has_its_own_n(llm):
    params = [SamplingParams(n=n, max_tokens=3, temperature=float(n > 1)) for n in (2, 1, 3)]
    outputs = llm.generate(["a", "b", "c"], params)
    assert [len(output.outputs) for output in outputs] == [2, 1, 3]
    assert [output.request_id for output in outputs] == ["0", "1", "2"]


def test_n_draws_from_choices_have_the_same_probabilities(llm):
    first, *others = answers(llm, SamplingParams(n=12, choices=["a", "b", "c"], temperature=2.0, seed=1))
    # Computed in float32, alone and side by side.
    assert all(other.probabilities == pytest.approx(first.probabilities, rel=1e-5) for other in others)
    assert len({output.text for output in (first, *others)}) > 1


def test_a_prompt_whose_samples_cannot_run_leaves_none_behind(llm):
    with pytest.raises(InvalidRequestError, match="prompt 1: token id 999"):
        llm.generate(["fine", {"prompt_token_ids": [999]}], SamplingParams(n=3))
    assert not llm.engine.has_work


def test_the_engine_answers_one_sample_a_request(llm):
    with pytest.raises(InvalidRequestError, match="n must be 1 here, not 2"):
        llm.engine.add(Request("r", [5], SamplingParams(n=2)))


def values(found: Mapping[int, Logprob]) -> dict[int, float]:
    return {token: each.logprob for token, each in found.items()}


def expected_logprobs(model, prompt: list[int], token_ids: tuple[int, ...]) -> torch.Tensor:
    """What transformers gives for each of an answer's tokens: [len(token_ids), vocab]."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *token_ids]])).logits[0]
    return logits[len(prompt) - 1 : -1].double().log_softmax(-1)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0, logprobs=3, max_tokens=8),
        SamplingParams(temperature=0, logprobs=0, max_tokens=8),
        SamplingParams(temperature=3.0, top_k=9, logprobs=2, max_tokens=8, ignore_eos=True),
        SamplingParams(logprobs=2, repetition_penalty=1.5, logit_bias={70: 90}, max_tokens=8, ignore_eos=True),
        SamplingParams(logprobs=500, max_tokens=2, ignore_eos=True),
        SamplingParams(logprobs=-1, max_tokens=2, ignore_eos=True),
    ],
    ids=["greedy", "its own only", "sampled", "adjusted", "more than all", "all"],
)
def test_logprobs_are_the_models_own_and_transformers(llm, chat_model, params):
    (output,) = llm.generate(PROMPT, params)
    answer = output.outputs[0]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    expected = expected_logprobs(chat_model, output.prompt_token_ids, answer.token_ids)
    for token, found, row in zip(answer.token_ids, answer.logprobs, expected, strict=True):
        assert_likeliest(found, token, row, params.logprobs or 0)
        texts = llm.get_tokenizer().decode_each(list(found))
        assert [each.decoded_token for each in found.values()] == texts
    own = [found[token].logprob for token, found in zip(answer.token_ids, answer.logprobs, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(own))


def test_those_who_do_not_ask_have_none_and_those_who_do_are_not_disturbed(llm):
    asking = SamplingParams(temperature=0, logprobs=4, max_tokens=6)
    less = SamplingParams(temperature=0, logprobs=1, max_tokens=6)
    plain = SamplingParams(temperature=0, max_tokens=6)
    mixed = [output.outputs[0] for output in llm.generate(["one", "one", "two", "one"], [asking, less, plain, plain])]
    assert [output.logprobs is None for output in mixed] == [False, False, True, True]
    assert [output.cumulative_logprob is None for output in mixed] == [False, False, True, True]
    assert mixed[0].token_ids == mixed[1].token_ids == mixed[3].token_ids
    (alone,) = answers(llm, asking, "one")
    assert alone.logprobs is not None
    assert [*map(values, mixed[0].logprobs)] == [pytest.approx(values(each), abs=1e-4) for each in alone.logprobs]


def test_all_of_a_prompts_log_probabilities(llm):
    [output] = llm.generate("abc", SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=-1))
    assert output.prompt_logprobs is not None
    assert [each and len(each) for each in output.prompt_logprobs] == [None, VOCAB_SIZE, VOCAB_SIZE]


# </s>, which ends the model's answers, <s>, and a letter.
END, BEGIN, A = 1, 0, 66


@pytest.mark.parametrize(
    ("params", "reason", "text"),
    [
        ({"logit_bias": {END: 100}}, None, ""),
        ({"logit_bias": {END: 100}, "stop_token_ids": [END]}, None, ""),
        ({"logit_bias": {END: 100}, "stop_token_ids": [END], "ignore_eos": True}, END, ""),
        ({"logit_bias": {A: 100}, "stop_token_ids": [A]}, A, ""),
        ({"logit_bias": {A: 100}, "stop_token_ids": [A], "max_tokens": 1}, A, ""),
        ({"logit_bias": {A: 100}, "stop": ["aaa", "aaaa"]}, "aaa", ""),
        ({"logit_bias": {A: 100}, "stop": "aaa", "include_stop_str_in_output": True}, "aaa", "aaa"),
        ({"logit_bias": {A: 100}, "max_tokens": 2}, None, "aa"),
    ],
)
def test_what_stopped_an_answer_is_said_as_in_vllm(llm, params, reason, text):
    (answer,) = answers(llm, SamplingParams(temperature=0, **params))
    assert answer.text == text
    assert answer.stop_reason == reason
    assert answer.finished()


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({}, A),
        ({"stop_token_ids": [A]}, A),
        ({"logit_bias": {END: 100}}, None),
        ({"structured_outputs": StructuredOutputsParams(regex="b")}, None),
    ],
)
def test_a_further_end_token_of_the_model_is_a_stop_reason(chat_folder, tmp_path, params, reason):
    """As Llama 3's <|eom_id|>, by which its calls are known; the tokenizer's own end token is none."""
    folder = copytree(chat_folder, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [A, END]}))
    llm = LLM(folder, num_gpu_blocks_override=16, max_num_seqs=2)
    assert llm.get_tokenizer().eos_token_id == END
    (answer,) = answers(llm, SamplingParams(**{"temperature": 0, "logit_bias": {A: 100}, **params}))
    assert (answer.finish_reason, answer.stop_reason) == ("stop", reason)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, ""),
        ({"skip_special_tokens": False}, "<s><s><s>"),
        ({"skip_special_tokens": False, "stop": "s><"}, "<"),
        ({"detokenize": False}, ""),
    ],
)
def test_special_tokens_are_written_out_where_that_is_asked_for(llm, params, text):
    (answer,) = answers(llm, SamplingParams(temperature=0, logit_bias={BEGIN: 100}, max_tokens=3, **params))
    assert answer.text == text


def test_the_token_that_ends_an_answer_is_written_only_if_stops_are(llm):
    params: dict[str, Any] = {"temperature": 0, "logit_bias": {END: 100}, "skip_special_tokens": False}
    assert answers(llm, SamplingParams(**params))[0].text == ""
    assert answers(llm, SamplingParams(**params, include_stop_str_in_output=True))[0].text == "</s>"


def test_without_detokenizing_tokens_are_numbers_alone(llm):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=1, prompt_logprobs=0, detokenize=False)
    plain = SamplingParams(temperature=0, max_tokens=4, logprobs=1, prompt_logprobs=0)
    [output], [expected] = llm.generate(PROMPT, params), llm.generate(PROMPT, plain)
    answer = output.outputs[0]
    assert (answer.text, answer.token_ids) == ("", expected.outputs[0].token_ids)
    for found in (answer.logprobs, output.prompt_logprobs):
        assert found is not None
        assert {each.decoded_token for entry in found if entry for each in entry.values()} == {None}
