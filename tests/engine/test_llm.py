"""The offline face, used as vLLM's users use theirs."""

import gc
import json
import re
from functools import partial
from shutil import copytree

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from headrace.engine.collector import YOUNG_OBJECTS
from headrace.engine.errors import ConfigError, InvalidRequestError, ModelError
from headrace.engine.llm import LLM
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.text.tokenizer import Tokenizer

from .conftest import continuation

GREEDY = SamplingParams(temperature=0, max_tokens=12)
CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def llm(chat_folder) -> LLM:
    return LLM(chat_folder, num_gpu_blocks_override=64, max_num_seqs=3, max_num_batched_tokens=20)


def test_results_come_in_the_order_of_the_prompts(llm, chat_model):
    prompts = ["a long prompt " * 4, "x", "a middling one", "a long prompt " * 3, "y", "z"]
    outputs = llm.generate(prompts, GREEDY)
    assert [output.prompt for output in outputs] == prompts
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = llm.get_tokenizer().encode(prompt)
        assert output.prompt_token_ids == ids
        assert list(output.outputs[0].token_ids) == continuation(chat_model, ids)
        # The answer ends where its tokens do, within a character perhaps.
        assert output.outputs[0].text == llm.get_tokenizer().decode(output.outputs[0].token_ids).rstrip("\ufffd")
        assert output.finished


def test_text_and_token_ids_are_the_same_prompt(llm):
    ids = llm.get_tokenizer().encode("same")
    mixed = llm.generate(["same", {"prompt_token_ids": ids}], GREEDY)
    assert mixed[0].outputs == mixed[1].outputs
    assert (mixed[0].prompt, mixed[1].prompt) == ("same", None)
    assert llm.generate("same", GREEDY)[0].outputs == mixed[0].outputs
    assert llm.generate({"prompt_token_ids": ids}, GREEDY)[0].outputs == mixed[0].outputs


@pytest.mark.parametrize("given", [[3, 4, 5], (3, 4, 5), [3, np.int64(4), 5]])
def test_token_ids_come_back_as_pythons_own_numbers_in_a_list_of_their_own(llm, given):
    found = llm.generate({"prompt_token_ids": given}, GREEDY)[0].prompt_token_ids
    assert (found, [type(each) for each in found]) == ([3, 4, 5], [int, int, int])
    assert found is not given


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ([3, 2**40], "outside the vocabulary"),
        ([3, 2**70], "must be whole numbers"),
        ([3, -1], "token id -1 is outside"),
        ([3, 4.0], "must be whole numbers"),
        ([3, "4"], "must be whole numbers"),
        ("34", "must be a list of token ids"),
    ],
)
def test_what_are_no_token_ids_is_said(llm, given, problem):
    with pytest.raises(InvalidRequestError, match=f"prompt 1: .*{problem}"):
        llm.generate(["fine", {"prompt_token_ids": given}], GREEDY)


def test_texts_are_encoded_together(llm, monkeypatch):
    prompts = ["a text", llm.get_tokenizer().encode("token ids"), {"prompt": "another text"}]
    expected = [llm.get_tokenizer().encode(text) for text in ("a text", "token ids", "another text")]
    monkeypatch.delattr(Tokenizer, "encode")
    assert [each.prompt_token_ids for each in llm.generate(prompts, GREEDY)] == expected


def test_token_ids_may_come_bare(llm):
    ids = llm.get_tokenizer().encode("same")
    [expected] = llm.generate("same", GREEDY)
    for prompts in (ids, [ids], tuple(ids), [tuple(ids)]):
        [output] = llm.generate(prompts, GREEDY)
        assert (output.prompt, output.prompt_token_ids) == (None, ids)
        assert output.outputs == expected.outputs


@pytest.mark.parametrize("kind", [np.array, torch.tensor, pa.array, lambda ids: [np.int32(token) for token in ids]])
def test_token_ids_of_any_library_are_pythons_numbers_in_the_output(llm, kind):
    ids = llm.get_tokenizer().encode("same")
    [output] = llm.generate({"prompt_token_ids": kind(ids)}, GREEDY)
    assert json.loads(json.dumps(output.prompt_token_ids)) == ids


@pytest.mark.parametrize("kind", [np.array, pd.Series, set, lambda texts: (text for text in texts)])
def test_lists_of_parameters_may_be_arrays_and_columns(llm, kind):
    params = SamplingParams(temperature=0, choices=kind(["a", "b"]))
    expected = SamplingParams(temperature=0, choices=["a", "b"])
    probabilities = [llm.generate("x", each)[0].outputs[0].probabilities for each in (params, expected)]
    assert probabilities[0] == pytest.approx(probabilities[1])
    assert set(SamplingParams(stop=kind(["a", "b"])).stop_strings) == {"a", "b"}
    assert set(SamplingParams(stop_token_ids=kind([1, 2])).stop_token_ids) == {1, 2}


def test_of_a_prompt_with_token_ids_and_a_text_the_token_ids_count(llm):
    ids = llm.get_tokenizer().encode("same")
    [output] = llm.generate({"prompt": "another", "prompt_token_ids": ids}, GREEDY)
    assert (output.prompt, output.prompt_token_ids) == ("another", ids)
    assert output.outputs == llm.generate("same", GREEDY)[0].outputs


def test_while_prompts_are_answered_the_collector_is_patient(llm):
    before, seen = gc.get_threshold(), []

    def make_bar(**options):
        seen.append(gc.get_threshold()[0])
        return Bar(**options)

    llm.generate(["a"], GREEDY, use_tqdm=make_bar)
    llm.chat(CHAT, GREEDY, use_tqdm=make_bar)
    assert seen == [YOUNG_OBJECTS, YOUNG_OBJECTS]
    with pytest.raises(InvalidRequestError, match="prompt 0"):
        llm.generate([{"prompt_token_ids": [10**6]}], GREEDY)
    assert gc.get_threshold() == before


def test_no_prompts_no_results(llm):
    assert llm.generate([], GREEDY) == []
    assert llm.chat([], GREEDY) == []


class Bar:
    """What `LLM` does with a bar of tqdm's."""

    def __init__(self, **options) -> None:
        self.options, self.postfix, self.is_closed = options, "", False
        self.updates: list[int] = []

    def update(self, count: int) -> None:
        self.updates.append(count)

    def close(self) -> None:
        self.is_closed = True


def test_a_bar_grows_by_the_prompts_whose_samples_are_all_there(llm):
    bars = []

    def make_bar(**options):
        bars.append(Bar(**options))
        return bars[-1]

    params = [SamplingParams(n=n, max_tokens=2 * n, ignore_eos=True) for n in (1, 3)]
    llm.generate(["a", "b"], params, use_tqdm=make_bar)
    [bar] = bars
    assert (bar.options["total"], sum(bar.updates), bar.is_closed) == (2, 2, True)
    rates = re.fullmatch(r"est. speed input: ([\d.]+) toks/s, output: ([\d.]+) toks/s", bar.postfix)
    assert rates is not None
    num_prompt_tokens = sum(len(llm.get_tokenizer().encode(text)) for text in "ab")
    assert float(rates[2]) / float(rates[1]) == pytest.approx((2 + 3 * 6) / num_prompt_tokens, rel=0.01)
    with pytest.raises(InvalidRequestError, match="prompt 0"):
        llm.generate([{"prompt_token_ids": [10**6]}], GREEDY, use_tqdm=make_bar)
    assert bars[-1].is_closed
    assert not bars[-1].updates


def test_the_bar_is_tqdms_unless_there_is_to_be_none(llm, capsys):
    chat = [{"role": "user", "content": "Hello"}]
    for call in (partial(llm.generate, "Hello", GREEDY), partial(llm.chat, chat, GREEDY)):
        call(use_tqdm=False)
        assert capsys.readouterr() == ("", "")
        call()
        out, err = capsys.readouterr()
        assert not out
        assert "Processed prompts: 100%" in err
        assert "1/1" in err
    llm.generate([], GREEDY)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("given", "meant"),
    [({"top_k": -1}, {"top_k": 0}), ({"seed": -1}, {"seed": None}), ({"stop_token_ids": None}, {"stop_token_ids": ()})],
)
def test_vllms_other_names_for_all_and_none(given, meant):
    assert SamplingParams(**given) == SamplingParams(**meant)


def test_each_prompt_can_have_its_own_parameters(llm):
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 5, 3)]
    outputs = llm.generate(["a", "b", "c"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 5, 3]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    with pytest.raises(InvalidRequestError, match="sampling_params: 3 for 2 prompts: give one, or one each"):
        llm.generate(["a", "b"], params)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda llm: llm.generate(None, GREEDY), "^prompts must be a list, not None$"),
        (lambda llm: llm.generate("x", {"max_tokens": 1}), "^sampling_params must be a SamplingParams, or one for"),
        (lambda llm: llm.generate("x", GREEDY, lora_request=7), "^lora_request must be a LoRARequest, or one for each"),
        (lambda llm: llm.chat("hello", GREEDY), "^messages must be a list, not 'hello'$"),
        (lambda llm: llm.chat(["hello"], GREEDY), "^messages must be a list, not 'hello'$"),
        (lambda llm: llm.chat({"role": "user", "content": "hello"}, GREEDY), "^messages must be a list, not {"),
        (
            lambda llm: llm.chat(CHAT, GREEDY, chat_template_kwargs=5),
            "^chat_template_kwargs must be a mapping of names",
        ),
        (lambda llm: llm.chat(CHAT, GREEDY, tools=np.zeros(2)), "^tools must be a list of functions as OpenAI's API"),
        (lambda llm: llm.chat(CHAT, GREEDY, tools=[5]), "^tools must be a list of functions as OpenAI's API"),
        (lambda llm: llm.generate("x", GREEDY, use_tqdm="no"), "^use_tqdm must be true or false, or what makes a bar"),
        (lambda llm: llm.generate({"prompt_token_ids": None}, GREEDY), "a prompt must be a text, a list of token ids"),
        (lambda llm: llm.generate({"prompt_token_ids": "ab"}, GREEDY), "prompt_token_ids must be a list of token ids"),
        (lambda llm: llm.generate("\ud800", GREEDY), r"^prompt 0: '\\ud800' in a prompt is no text: leave it out$"),
        (lambda llm: llm.chat([{"role": "user", "content": "\ud800"}], GREEDY), "in a prompt is no text"),
    ],
)
def test_arguments_of_another_type_are_named(llm, call, message):
    with pytest.raises(InvalidRequestError, match=message):
        call(llm)


def test_prompts_may_come_from_a_generator(llm):
    assert [output.prompt for output in llm.generate((text for text in "ab"), GREEDY)] == ["a", "b"]


def test_a_second_call_finds_the_prefix_of_the_first(llm):
    prompt = "You are a helpful assistant who answers in one word. " * 2
    llm.generate(prompt, GREEDY)
    ids = llm.get_tokenizer().encode(prompt)
    assert llm.generate(prompt, GREEDY)[0].num_cached_tokens == (len(ids) - 1) // 16 * 16


def test_a_lower_priority_goes_first(llm, monkeypatch):
    """Three run at a time."""
    order: list[str] = []
    step = llm.engine.step

    def noted():
        events = step()
        order.extend(event.request_id for event in events if event.finished)
        return events

    monkeypatch.setattr(llm.engine, "step", noted)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    outputs = llm.generate(list("abcdef"), params, priority=[1, 1, 1, 0, 0, 0])
    assert sorted(order[:3]) == sorted(output.request_id for output in outputs[3:])
    with pytest.raises(InvalidRequestError, match="priority: 2 for 1 prompts: give one, or one each"):
        llm.generate("a", GREEDY, priority=[1, 2])
    with pytest.raises(InvalidRequestError, match="priority must be a whole number, or one for each prompt, not 'a'"):
        llm.generate("a", GREEDY, priority="a")


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt_token_ids": []}, "prompt 1: prompt is empty"),
        ([], "prompt 1: prompt is empty"),
        ({"prompt_token_ids": 5}, "prompt 1: prompt_token_ids must be a list of token ids, not 5"),
        ({"prompt_token_ids": "5"}, "prompt 1: prompt_token_ids must be a list of token ids, not '5'"),
        (["x"], "prompt 1: prompt_token_ids: token ids must be whole numbers"),
        ({"prompt_token_ids": [1, 2.0]}, "prompt 1: prompt_token_ids: token ids must be whole numbers"),
        ("", "prompt 1: prompt is empty"),
        ({"prompt_token_ids": [1, 307]}, "prompt 1: token id 307 is outside the vocabulary of 307 tokens"),
        ("x" * 300, "prompt 1: prompt has 300 tokens.*at most 256 fit"),
        ({"token_ids": [1]}, "a prompt must be a text, a list of token ids, or"),
        (7, "a prompt must be a text, a list of token ids, or"),
    ],
)
def test_a_prompt_that_cannot_run_is_named_and_none_runs(llm, prompt, message):
    steps = llm.engine.stats.num_steps
    with pytest.raises(InvalidRequestError, match=message) as error:
        llm.generate(["good", prompt, "good too"], GREEDY)
    assert "\n" not in str(error.value)
    assert llm.engine.stats.num_steps == steps
    assert not llm.engine.has_work


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": float("nan")}, "temperature must be ≥ 0, not nan"),
        ({"temperature": -0.1}, "temperature must be ≥ 0, not -0.1"),
        ({"temperature": float("inf")}, "temperature must be ≥ 0, not inf"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], not 0"),
        ({"top_p": float("nan")}, "top_p must be"),
        ({"top_p": 1.5}, "top_p must be"),
        ({"top_k": -2}, "top_k must be ≥ 0"),
        ({"min_p": 2}, "min_p must be"),
        ({"max_tokens": 0}, "max_tokens must be ≥ 1, not 0"),
        ({"seed": -2}, "seed must be"),
        ({"seed": 2**63}, "seed must be"),
        ({"seed": 1.5}, "seed must be a whole number, not 1.5"),
        ({"temperature": "warm"}, "temperature must be a number, not 'warm'"),
        ({"temperature": 10**400}, "temperature must be a number, not 10"),
        ({"stop": 10**5000}, "stop must be a text or a list of texts, not a number of thousands of digits"),
        ({"n": -(10**5000)}, "n must be ≥ 1, not a number of thousands of digits"),
        ({"n": 0}, "n must be ≥ 1, not 0"),
        ({"n": 2, "temperature": 0}, "n must be 1 with temperature 0"),
        ({"presence_penalty": 2.1}, r"presence_penalty must be in \[-2, 2\], not 2.1"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be"),
        ({"frequency_penalty": -3}, "frequency_penalty must be"),
        ({"frequency_penalty": None}, "frequency_penalty must be a number, not None"),
        ({"repetition_penalty": 0}, "repetition_penalty must be > 0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be"),
        ({"min_tokens": -1}, "min_tokens must be ≥ 0"),
        ({"min_tokens": 17}, "min_tokens must be ≥ 0 and at most max_tokens, not 17"),
        ({"logprobs": -2}, "logprobs must be ≥ 0"),
        ({"logprobs": True, "n": "2"}, "n must be a whole number, not '2'"),
        ({"logit_bias": {5: 101}}, r"logit_bias must be in \[-100, 100\], not 101 \(token 5\)"),
        ({"logit_bias": {5: float("nan")}}, "logit_bias must be in"),
        ({"logit_bias": {"5": 1}}, "logit_bias must be a mapping of token ids to numbers, not keyed by '5'"),
        ({"logit_bias": [5]}, "logit_bias must be a mapping"),
        ({"stop": ""}, "stop must be without an empty text"),
        ({"stop": ["a", 1]}, "stop must be a text or a list of texts"),
        ({"stop": b"a"}, "stop must be a text or a list of texts"),
        ({"stop": 0}, "stop must be a text or a list of texts, not 0"),
        ({"stop_token_ids": 7}, "stop_token_ids must be a list of token ids, not 7"),
        ({"stop_token_ids": ["a"]}, r"stop_token_ids must be a list of token ids, not \['a'\]"),
        ({"stop_token_ids": [-1]}, "stop_token_ids must be a list of token ids"),
        ({"ignore_eos": "no"}, "ignore_eos must be true or false, not 'no'"),
        ({"temperature": True}, "temperature must be a number, not True"),
        ({"n": True}, "n must be a whole number, not True"),
        ({"n": 2.0}, "n must be a whole number, not 2.0"),
        ({"max_tokens": -3}, "max_tokens must be ≥ 1, not -3"),
        ({"top_p": -0.1}, "top_p must be"),
        ({"top_k": 2.5}, "top_k must be a whole number, not 2.5"),
        ({"min_p": float("nan")}, "min_p must be in"),
        ({"prompt_logprobs": -2}, "prompt_logprobs must be ≥ 0, not -2"),
        ({"detokenize": False, "stop": "a"}, "stop needs the text: leave out detokenize=False"),
        ({"skip_special_tokens": 0}, "skip_special_tokens must be true or false, not 0"),
        ({"prompt_logprobs": "3"}, "prompt_logprobs must be a whole number, not '3'"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias must be a mapping of token ids to numbers, not keyed by -1"),
        ({"logit_bias": {5: "up"}}, r"logit_bias must be in \[-100, 100\], not 'up' \(token 5\)"),
        ({"choices": "ab"}, "choices must be a non-empty list of texts, not 'ab'"),
        ({"choices": {"a": 1}}, "choices must be a non-empty list of texts, not {'a': 1}"),
        ({"choices": np.array([1.5, 2])}, r"choices must be a non-empty list of texts, not \[np.float64\(1.5\), "),
        ({"stop_token_ids": {"a"}}, "stop_token_ids must be a list of token ids"),
        ({"choices": []}, r"choices must be a non-empty list of texts, not \[\]"),
        ({"choices": [1, 2.5]}, "choices must be a non-empty list of texts"),
        ({"choices": [True, False]}, "choices must be a non-empty list of texts"),
        ({"choices": ["a"], "prompt_logprobs": 1}, "prompt_logprobs has no meaning with choices"),
        ({"choices": ["a"], "stop": "b"}, "stop has no meaning with choices"),
        ({"choices": ["a"], "logprobs": 0}, "logprobs has no meaning with choices"),
        ({"choices": ["a"], "logit_bias": {1: 1}}, "logit_bias has no meaning with choices"),
    ],
)
def test_sampling_parameters_out_of_range(params, message):
    with pytest.raises(InvalidRequestError, match=message) as error:
        SamplingParams(**params)
    assert error.value.field in params


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"skip_tokenizer_init": "no"}, "skip_tokenizer_init must be true or false, not 'no'"),
        ({"generation_config": "x"}, "generation_config must be auto, vllm, or a folder that has"),
        ({"dtype": np.zeros(2)}, "dtype must be one of auto,"),
        ({"device": None}, "device must be a text such as 'cpu' or 'cuda', not None"),
        ({"max_model_len": 10**30}, r"max_model_len must be at most 2\*\*63 - 1"),
        ({"max_model_len": 2**31}, "max_model_len must be at most 2147483647, not 2147483648"),
        ({"max_model_len": 2**31 - 1}, "max_model_len=2147483647 exceeds the model's context of 256 tokens"),
        (
            {"num_gpu_blocks_override": 2**60},
            "num_gpu_blocks_override must be at most 2147483647, not 1152921504606846976",
        ),
        ({"kv_cache_memory_bytes": 2**60}, "the system does not give .* lower kv_cache_memory_bytes or"),
        ({"num_threads": 2**33}, "num_threads must be at most 4096"),
        ({"cuda_graph_sizes": 5}, "cuda_graph_sizes must be a list of whole numbers, not 5"),
        ({"cuda_graph_sizes": ["a"]}, "cuda_graph_sizes must be a list of whole numbers"),
        ({"lora_modules": 5, "enable_lora": True}, "lora_modules must be a list of LoRARequest, not 5"),
        ({"lora_modules": ["kind=x"], "enable_lora": True}, "lora_modules must be a list of LoRARequest"),
    ],
    ids=str,
)
def test_options_of_another_type_are_named(chat_folder, option, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        LLM(chat_folder, **option)


def test_an_unknown_option_is_named_with_the_known_ones(chat_folder):
    with pytest.raises(TypeError, match=r"unknown option 'max_seqs'; known: dtype, device, .*max_num_seqs"):
        LLM(chat_folder, max_seqs=4)


def test_a_max_model_len_beyond_the_kv_memory(chat_folder):
    with pytest.raises(ConfigError, match="max_model_len=200 needs 13 KV blocks of 16 tokens, but KV memory holds 4"):
        LLM(chat_folder, max_model_len=200, num_gpu_blocks_override=4)
    with pytest.raises(ConfigError, match="or lower max_model_len to ") as refusal:
        LLM(chat_folder, max_model_len=200, kv_cache_memory_bytes=2**16)
    enough = int(re.search(r"raise kv_cache_memory_bytes to (\d+),", str(refusal.value)).group(1))
    assert LLM(chat_folder, max_model_len=200, kv_cache_memory_bytes=enough).engine.max_model_len == 200
    with pytest.raises(ConfigError, match="raise kv_cache_memory_bytes to"):
        LLM(chat_folder, max_model_len=200, kv_cache_memory_bytes=enough - 1)
    with pytest.raises(ConfigError, match="max_model_len=257 exceeds the model's context of 256"):
        LLM(chat_folder, max_model_len=257, num_gpu_blocks_override=32)


def test_a_missing_tokenizer_is_known_before_the_weights_are_read(tmp_path, chat_folder):
    folder = copytree(chat_folder, tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        LLM(folder)


def test_an_interrupted_call_leaves_nothing_for_the_next_one(llm, monkeypatch):
    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["one", "two"], GREEDY)
    assert not llm.engine.has_work
    assert len(llm.generate(["one"], GREEDY)) == 1


def test_without_a_tokenizer_prompts_are_token_ids_and_answers_have_no_text(tmp_path, llm, chat_folder):
    folder = copytree(chat_folder, tmp_path / "model", ignore=lambda _, names: [n for n in names if "token" in n])
    bare = LLM(folder, skip_tokenizer_init=True, num_gpu_blocks_override=64)
    ids = llm.get_tokenizer().encode("token ids")
    (output,) = bare.generate({"prompt_token_ids": ids}, GREEDY)
    assert output.outputs[0].token_ids == llm.generate("token ids", GREEDY)[0].outputs[0].token_ids
    assert output.outputs[0].text == ""
    with pytest.raises(InvalidRequestError, match="no tokenizer for texts: give token ids"):
        bare.generate("text", GREEDY)
    with pytest.raises(InvalidRequestError, match=r"^prompt 1: there is no tokenizer for texts"):
        bare.generate([ids, "text"], GREEDY)
    with pytest.raises(InvalidRequestError, match="no tokenizer for texts"):
        bare.chat([{"role": "user", "content": "text"}], GREEDY)
    with pytest.raises(InvalidRequestError, match="no tokenizer for texts"):
        bare.generate({"prompt_token_ids": ids}, SamplingParams(choices=["a", "b"]))
    with pytest.raises(InvalidRequestError, match="no tokenizer for texts"):
        bare.generate({"prompt_token_ids": ids}, SamplingParams(stop="a"))
