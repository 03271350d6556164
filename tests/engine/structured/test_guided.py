"""Answers that follow a grammar, from models that know nothing of it, whatever else happens."""

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jsonschema_rs
import pytest

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.errors import InvalidRequestError
from headrace.engine.llm import LLM
from headrace.engine.request import FinishReason, Request
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.structured import grammar as grammar_module
from headrace.engine.structured.structured_outputs import StructuredOutputsParams
from headrace.engine.text.detokenizer import StopStrings

from ..fakes import FakeRunner, make_engine
from ..running import run_all, token_ids

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["x", "yes", None]}, "maxItems": 3},
        "deep": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/pair"}]},
    },
    "required": ["name", "age", "tags", "deep"],
    "additionalProperties": False,
    "$defs": {"pair": {"type": "object", "properties": {"left": {"type": "null"}}, "required": ["left"]}},
}
IS_VALID = jsonschema_rs.validator_for(SCHEMA).is_valid
JSON = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
LOOSE = StructuredOutputsParams(json={**SCHEMA, "properties": {**SCHEMA["properties"], "name": {"const": "n"}}})  # type: ignore[dict-item]
WORD = StructuredOutputsParams(regex="[a-z]{2,9}[0-9]?")
END, NUM_TOKENS, VOCAB_SIZE = 1, 258, 307
logging.getLogger("headrace.engine.engine").setLevel(logging.CRITICAL)


@pytest.fixture(scope="module")
def llm(chat_folder) -> LLM:
    return LLM(chat_folder, num_gpu_blocks_override=512, max_num_seqs=8, max_num_batched_tokens=40)


@pytest.fixture(scope="module")
def tight(chat_folder) -> LLM:
    """As `llm`, in memory for hardly more than one answer."""
    return LLM(chat_folder, num_gpu_blocks_override=18, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=40)


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.0, "seed": 1},
    "hot": {"temperature": 5.0, "seed": 2},
    "filtered": {"temperature": 2.0, "seed": 3, "top_k": 3, "top_p": 0.7, "min_p": 0.05},
    "penalties": {"temperature": 1.0, "seed": 4, "repetition_penalty": 1.5, "presence_penalty": 1.0},
    "towards the end": {"temperature": 1.0, "seed": 5, "logit_bias": {END: 100.0, 70: -100.0}},
    "minimum": {"temperature": 1.0, "seed": 6, "min_tokens": 45},
    "logprobs": {"temperature": 1.0, "seed": 7, "logprobs": 2},
}
PLAIN = SamplingParams(temperature=1.0, seed=8, max_tokens=50)


def test_every_answer_follows_its_schema_and_its_neighbours_do_not_notice(llm):
    guided = [
        SamplingParams(max_tokens=230, structured_outputs=shape, **options)
        for options in OPTIONS.values()
        for shape in (JSON, LOOSE)
    ]
    plain = [PLAIN, replace(PLAIN, repetition_penalty=1.3)]
    outputs = [each.outputs[0] for each in llm.generate(["the prompt"] * 18, [*guided, *plain])]
    finished = [each for each in outputs[:16] if each.finish_reason == "stop"]
    assert len(finished) >= 12
    for output in finished:
        assert IS_VALID(json.loads(output.text)), output.text
        assert output.token_ids[-1] == END
    assert all(
        each.finish_reason == "length" and len(each.token_ids) == 230 for each in outputs[:16] if each not in finished
    )
    assert outputs[16:] == [each.outputs[0] for each in llm.generate(["the prompt"] * 2, plain)]
    assert max(token for each in outputs[:16] for token in each.token_ids) < NUM_TOKENS


@pytest.mark.parametrize("name", OPTIONS)
def test_an_expression_matches_the_whole_answer(llm, name):
    params = SamplingParams(max_tokens=50, structured_outputs=WORD, **OPTIONS[name])
    for output in llm.generate(["a", "the prompt", "and one more"], params):
        assert output.outputs[0].finish_reason == "stop"
        assert re.fullmatch("[a-z]{2,9}[0-9]?", output.outputs[0].text)


def test_samples_of_a_prompt_go_their_own_ways(llm):
    params = SamplingParams(n=6, temperature=2.0, seed=3, max_tokens=60, structured_outputs=WORD)
    texts = [each.text for each in llm.generate("the prompt", params)[0].outputs]
    assert len(set(texts)) > 3
    assert all(re.fullmatch("[a-z]{2,9}[0-9]?", text) for text in texts)
    alone = llm.generate("the prompt", replace(params, n=1))[0].outputs[0].text
    assert texts[0] == alone


def test_preempted_answers_are_the_same(llm, tight):
    params = [
        SamplingParams(temperature=1.5, seed=seed, max_tokens=150, structured_outputs=shape)
        for seed, shape in enumerate([JSON, None, WORD, JSON, LOOSE, None])
    ]
    prompts = [f"prompt number {index}" for index in range(6)]
    expected = [each.outputs[0] for each in llm.generate(prompts, params)]
    assert [each.outputs[0] for each in tight.generate(prompts, params)] == expected
    assert tight.engine.stats.num_preemptions > 0


def request(llm: LLM, params: SamplingParams, known: Sequence[int] = (), name: str = "r") -> Request:
    tokenizer = llm.get_tokenizer()
    checker = StopStrings.of(tokenizer, params)
    grammar = tokenizer.grammar(params.structured_outputs)
    prompt = tokenizer.encode("the prompt")
    return Request(name, prompt, params, stop_checker=checker, grammar=grammar, resume_token_ids=tuple(known))


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 2.0, "seed": 9}], ids=["greedy", "drawn"])
@pytest.mark.parametrize("logprobs", [None, 0])
def test_from_every_cut_the_rest_is_the_same(llm, options, logprobs):
    params = SamplingParams(max_tokens=200, structured_outputs=JSON, logprobs=logprobs, **options)
    answer = token_ids(run_all(llm.engine, [request(llm, params)])["r"])
    assert IS_VALID(json.loads(llm.get_tokenizer().decode(answer[:-1])))
    requests = [request(llm, params, answer[:cut], str(cut)) for cut in range(len(answer) + 1)]
    for cut, events in enumerate(run_all(llm.engine, requests).values()):
        assert token_ids(events) == answer[cut:]
        assert events[-1].finish_reason is FinishReason.STOP


def test_known_tokens_that_do_not_fit_the_grammar_are_refused(llm):
    params = SamplingParams(structured_outputs=WORD)
    with pytest.raises(InvalidRequestError, match="does not fit structured_outputs") as caught:
        llm.engine.add(request(llm, params, llm.get_tokenizer().encode("ab!")))
    assert caught.value.field == "resume_token_ids"
    assert not llm.engine.has_work


def test_no_step_is_spent_on_an_end_that_is_all_that_is_left(llm):
    params = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(choice=["abc"]))
    before = llm.engine.stats.num_steps
    events = run_all(llm.engine, [request(llm, params)])["r"]
    assert [len(event.new_token_ids) for event in events] == [1, 1, 2]
    assert llm.engine.stats.num_steps - before == 3
    # Its log-probability has to be computed.
    events = run_all(llm.engine, [request(llm, replace(params, logprobs=0))])["r"]
    assert [len(event.logprobs) for event in events] == [1, 1, 1, 1]
    assert events[-1].new_token_ids == (END,)


@pytest.mark.parametrize("logprobs", [None, 0])
def test_an_answer_is_as_long_as_asked_for_where_the_grammar_lets_it(llm, logprobs):
    open_end = StructuredOutputsParams(regex="[ab]+")
    params = SamplingParams(
        temperature=1.0, min_tokens=7, logit_bias={END: 100}, structured_outputs=open_end, logprobs=logprobs
    )
    output = llm.generate("the prompt", params)[0].outputs[0]
    assert (len(output.text), output.finish_reason) == (7, "stop")
    closed = replace(params, structured_outputs=StructuredOutputsParams(regex="[ab]{3}"))
    output = llm.generate("the prompt", closed)[0].outputs[0]
    assert (len(output.text), output.finish_reason) == (3, "stop")


def test_what_max_tokens_cut_ends_by_length(llm):
    params = SamplingParams(temperature=0, max_tokens=5, structured_outputs=JSON)
    output = llm.generate("the prompt", params)[0].outputs[0]
    assert (output.text, output.finish_reason) == ('{"nam', "length")
    # The end token counts.
    for most, reason in ((3, "length"), (4, "stop")):
        params = SamplingParams(max_tokens=most, structured_outputs=StructuredOutputsParams(choice=["abc"]))
        output = llm.generate("the prompt", params)[0].outputs[0]
        assert (output.text, output.finish_reason) == ("abc", reason)


def test_a_stop_string_ends_a_guided_answer(llm):
    params = SamplingParams(temperature=0, max_tokens=50, structured_outputs=JSON, stop='"age"')
    output = llm.generate("the prompt", params)[0].outputs[0]
    assert re.fullmatch(r'{"name":".*",', output.text)
    assert output.finish_reason == "stop"


def test_the_mask_is_applied_before_the_answers_tokens_are_ranked(llm):
    """An unlikely but allowed token is taken, and reported as unlikely as it is."""
    params = SamplingParams(temperature=0, structured_outputs=StructuredOutputsParams(choice=["z"]), logprobs=1)
    free = llm.generate("the prompt", SamplingParams(temperature=0, max_tokens=1, logprobs=1))[0].outputs[0]
    first = llm.generate("the prompt", params)[0].outputs[0].logprobs[0]
    own, likeliest = list(first)
    assert llm.get_tokenizer().decode([own]) == "z"
    assert likeliest == free.token_ids[0]
    assert first[own].rank > 1


def test_a_grammar_that_becomes_too_complex_fails_its_own_request_only(llm, monkeypatch):
    monkeypatch.setitem(grammar_module._LIMITS, "max_lexer_states", 60)
    # A count of its own for each length.
    complex_ = StructuredOutputsParams(regex="[a-z]{150,200}")
    requests = [
        request(llm, SamplingParams(temperature=1, seed=1, max_tokens=200, structured_outputs=shape), name=str(index))
        for index, shape in enumerate([WORD, complex_, None])
    ]
    events = run_all(llm.engine, requests)
    assert [each[-1].finish_reason for each in events.values()][:2] == [FinishReason.STOP, FinishReason.ERROR]
    assert "too many states" in (events["1"][-1].error or "")
    assert len(events["1"]) > 20
    assert events["2"][-1].error is None


def test_every_end_token_of_the_model_may_end_an_answer(chat_folder):
    llm = LLM(chat_folder, num_gpu_blocks_override=64)
    ends = [2, 90]
    engine = Engine(llm.engine._runner, EngineConfig(num_gpu_blocks_override=64), 256, ends)
    shape = StructuredOutputsParams(regex="[ab]+")
    for end in ends:
        params = SamplingParams(temperature=0, logit_bias={end: 100}, structured_outputs=shape)
        assert token_ids(run_all(engine, [request(llm, params)])["r"])[-1] == end


def test_what_the_engine_needs_for_it(llm):
    engine, _ = make_engine()
    shaped = SamplingParams(structured_outputs=WORD)
    with pytest.raises(InvalidRequestError, match=r"structured_outputs need Request\.grammar"):
        engine.add(Request("r", [1], shaped))
    endless = Engine(FakeRunner(8, 8), EngineConfig(block_size=8), 64)
    with pytest.raises(InvalidRequestError, match="structured_outputs need an end token, and the model has none"):
        endless.add(Request("r", [1], shaped, grammar=llm.get_tokenizer().grammar(WORD)))


def test_events_bring_each_token_once(llm):
    params = SamplingParams(temperature=1.0, seed=4, max_tokens=150, structured_outputs=JSON)
    events = run_all(llm.engine, [request(llm, params)])["r"]
    assert all(not one.finished for one, _ in pairwise(events))
    assert json.loads(llm.get_tokenizer().decode(token_ids(events)[:-1]))
