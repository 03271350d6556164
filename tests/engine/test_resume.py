"""An answer that goes on from its first tokens is the undisturbed one, wherever it was cut."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from headrace.engine.errors import InvalidRequestError
from headrace.engine.llm import LLM
from headrace.engine.request import FinishReason, Request, RequestEvent
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.text.detokenizer import StopStrings
from headrace.engine.text.finished_answer import answer_text

from .fakes import CONTEXT, END_TOKEN_ID, fake_answer, make_engine
from .running import greedy_params, run_all, token_ids

PROMPT = [token % 10 + 1 for token in range(21)]
PLAIN: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
PARAMS = {
    "greedy": SamplingParams(temperature=0, **PLAIN),
    "drawn": SamplingParams(temperature=1.3, seed=5, **PLAIN),
    "without a seed": SamplingParams(temperature=1.3, **PLAIN),
    "filtered": SamplingParams(temperature=1.5, seed=6, top_k=5, top_p=0.9, min_p=0.01, **PLAIN),
    "penalties": SamplingParams(
        temperature=0.8, seed=7, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.6, **PLAIN
    ),
    "minimum": SamplingParams(temperature=0.9, seed=8, min_tokens=9, max_tokens=24, logit_bias={END_TOKEN_ID: 3.0}),
    "logprobs": SamplingParams(temperature=1.1, seed=9, logprobs=3, **PLAIN),
    "allowed": SamplingParams(temperature=1.0, seed=10, allowed_token_ids=range(3, 9), **PLAIN),
}


@pytest.mark.parametrize("name", PARAMS)
def test_from_every_cut_the_rest_is_the_same(name):
    engine, _ = make_engine(num_blocks=64, max_num_batched_tokens=30)
    whole = Request("same", PROMPT, PARAMS[name])
    expected = run_all(engine, [whole])["same"]
    answer, logprobs = token_ids(expected), [each for event in expected for each in event.logprobs]
    assert len(answer) > 4
    for cut in range(len(answer)):
        events = run_all(engine, [replace(whole, resume_token_ids=tuple(answer[:cut]))])["same"]
        assert token_ids(events) == answer[cut:]
        assert [each for event in events for each in event.logprobs] == logprobs[cut:]
        assert events[-1].finish_reason is expected[-1].finish_reason


def test_a_bad_word_may_have_begun_in_what_is_resumed():
    engine, _ = make_engine(num_blocks=64, max_num_batched_tokens=30)
    params = SamplingParams(temperature=1.0, seed=11, allowed_token_ids=[3, 4], bad_words=["a"], **PLAIN)
    whole = Request("same", PROMPT, params, bad_words_token_ids=((3, 3, 3), (4, 4)))
    answer = token_ids(run_all(engine, [whole])["same"])
    text = "".join(map(str, answer))
    assert "33" in text
    assert "333" not in text
    assert "44" not in text
    for cut in range(len(answer)):
        assert (
            token_ids(run_all(engine, [replace(whole, resume_token_ids=tuple(answer[:cut]))])["same"]) == answer[cut:]
        )


@pytest.mark.parametrize("is_caching", [True, False])
@pytest.mark.parametrize("num_blocks", [12, 16, 64])
def test_resumed_ones_run_among_others_and_are_preempted_like_them(num_blocks, is_caching):
    engine, _ = make_engine(num_blocks, enable_prefix_caching=is_caching, max_num_batched_tokens=25)
    wholes = [
        Request(f"{name}{copy}", [*PROMPT, copy + 1], replace(params, seed=copy))
        for name, params in PARAMS.items()
        for copy in range(2)
    ]
    answers = [fake_answer(each, engine.max_model_len) for each in wholes]
    requests = [
        replace(each, resume_token_ids=answer[: (3 * index) % len(answer)])
        for index, (each, answer) in enumerate(zip(wholes, answers, strict=True))
    ]
    events = run_all(engine, requests)
    assert (engine.stats.num_preemptions > 0) == (num_blocks < 64)
    for request, answer in zip(requests, answers, strict=True):
        assert token_ids(events[request.request_id]) == answer[len(request.resume_token_ids) :]


def test_known_tokens_are_computed_with_the_prompt_and_found_in_the_cache():
    engine, _ = make_engine()
    whole = Request("first", PROMPT, greedy_params(20))
    answer = token_ids(run_all(engine, [whole])["first"])
    computed = engine.stats.num_computed_tokens
    events = run_all(engine, [Request("again", PROMPT, greedy_params(20), resume_token_ids=answer[:12])])["again"]
    # 21 + 12 tokens, four blocks of 8 of which are cached; then 7 of the remaining 8 are fed back.
    assert engine.stats.num_computed_tokens - computed == 1 + 7
    assert events[0].num_cached_tokens == len(PROMPT)


def test_samples_resume_on_their_own_beside_those_that_begin():
    engine, _ = make_engine()
    drawn = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    wholes = [Request(str(seed), PROMPT, replace(drawn, seed=seed)) for seed in range(6)]
    answers = {each.request_id: fake_answer(each, engine.max_model_len) for each in wholes}
    for resumed in ({"0"}, {"3"}, {"0", "1", "4"}, set(answers)):
        requests = [
            replace(
                each,
                fork_of="0" if each.request_id != "0" else None,
                resume_token_ids=answers[each.request_id][:5] if each.request_id in resumed else (),
            )
            for each in wholes
        ]
        events = run_all(engine, requests)
        for request in requests:
            rest = answers[request.request_id][len(request.resume_token_ids) :]
            assert token_ids(events[request.request_id]) == rest


def test_the_prompts_logprobs_come_with_the_first_new_token():
    engine, _ = make_engine()
    params = replace(greedy_params(8), prompt_logprobs=2)
    expected = run_all(engine, [Request("whole", PROMPT, params)])["whole"]
    known = token_ids(expected)[:3]
    events = run_all(engine, [Request("rest", PROMPT, params, resume_token_ids=known)])["rest"]
    assert events[0].prompt_logprobs == expected[0].prompt_logprobs
    assert not any(event.prompt_logprobs for event in events[1:])


class Ends:
    """A stop checker that ends an answer at its `length`-th token."""

    def __init__(self, length: int) -> None:
        self.left = length

    def __call__(self, token_id: int) -> bool:
        self.left -= 1
        return self.left == 0


COMPLETE = {
    "length": (Request("done", PROMPT, greedy_params(3), resume_token_ids=[4, 5, 6]), FinishReason.LENGTH),
    "context": (
        Request("done", PROMPT, greedy_params(None), resume_token_ids=[4] * (CONTEXT - len(PROMPT))),
        FinishReason.LENGTH,
    ),
    "end token": (Request("done", PROMPT, resume_token_ids=[4, END_TOKEN_ID]), FinishReason.STOP),
    "stop token": (
        Request("done", PROMPT, SamplingParams(stop_token_ids=(7,)), resume_token_ids=[4, 7]),
        FinishReason.STOP,
    ),
    "stop string": (Request("done", PROMPT, stop_checker=Ends(2), resume_token_ids=[4, 5]), FinishReason.STOP),
}


@pytest.mark.parametrize("name", COMPLETE)
def test_a_complete_answer_ends_at_the_next_step_without_computing(name):
    request, reason = COMPLETE[name]
    engine, _ = make_engine()
    engine.add(request)
    # It is nobody's to wait for.
    engine.add(Request("fork", PROMPT, greedy_params(2), fork_of="done"))
    events = {event.request_id: event for event in engine.step()}
    assert events["done"] == RequestEvent("done", (), reason)
    while engine.has_work:
        engine.step()
        engine.check()
    assert engine.stats.num_computed_tokens == len(PROMPT) + 1


def test_a_complete_answer_can_be_aborted():
    engine, _ = make_engine()
    request, _ = COMPLETE["length"]
    engine.add(request)
    assert engine.abort("done")
    assert engine.step() == []


def _broken(token_id: int) -> bool:
    raise ValueError("broken")


REFUSED = {
    "too many": (
        Request("r", PROMPT, greedy_params(3), resume_token_ids=[1] * 4),
        "resume_token_ids are 4 tokens, but the answer may have at most 3",
    ),
    "context": (
        Request("r", PROMPT, greedy_params(None), resume_token_ids=[1] * 60),
        "resume_token_ids are 60 tokens, but the answer may have at most 43",
    ),
    "vocabulary": (Request("r", PROMPT, resume_token_ids=[11]), "resume_token_ids: token id 11 is outside"),
    "type": (Request("r", PROMPT, resume_token_ids=["x"]), "resume_token_ids: token ids must be whole"),  # type: ignore[list-item]
    "after the end": (Request("r", PROMPT, resume_token_ids=[4, END_TOKEN_ID, 5]), "go on after token 2"),
    "after a stop": (Request("r", PROMPT, stop_checker=Ends(1), resume_token_ids=[4, 5]), "go on after token 1"),
    "checker": (
        Request("r", PROMPT, stop_checker=_broken, resume_token_ids=[4]),
        "resume_token_ids cannot be this answer's: broken",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tokens_that_cannot_be_the_answers_are_refused(name):
    request, message = REFUSED[name]
    engine, _ = make_engine()
    with pytest.raises(InvalidRequestError, match=message):
        engine.add(request)
    assert not engine.has_work


CHOICES = ((4, 5), (4, 6), (7,))
CHOOSING = SamplingParams(temperature=0, choices=["a", "b", "c"])


def test_a_choice_that_is_known_stands_and_its_probabilities_are_computed():
    engine, _ = make_engine()
    expected = run_all(engine, [Request("whole", PROMPT, CHOOSING, CHOICES)])["whole"][0]
    for index, choice in enumerate(CHOICES):
        event = run_all(engine, [Request("r", PROMPT, CHOOSING, CHOICES, resume_token_ids=choice)])["r"][0]
        assert (event.choice_index, event.new_token_ids) == (index, ())
        assert event.choice_probabilities == pytest.approx(expected.choice_probabilities)


def test_half_a_choice_is_refused():
    engine, _ = make_engine()
    with pytest.raises(InvalidRequestError, match="resume_token_ids are none of the choices"):
        engine.add(Request("r", PROMPT, CHOOSING, CHOICES, resume_token_ids=(4,)))


@pytest.fixture(scope="module")
def llm(chat_folder) -> LLM:
    return LLM(chat_folder, num_gpu_blocks_override=64, max_num_seqs=4, max_num_batched_tokens=20)


def answer_of(llm: LLM, prompt: list[int], params: SamplingParams, known: Sequence[int] = ()) -> tuple[list[int], str]:
    """All tokens of an answer, the known ones first, and its text."""
    checker = StopStrings.of(llm.get_tokenizer(), params)
    request = Request("r", prompt, params, stop_checker=checker, resume_token_ids=tuple(known))
    events = run_all(llm.engine, [request])["r"]
    tokens = [*known, *token_ids(events)]
    return tokens, answer_text(llm.get_tokenizer(), request, tokens, events[-1].finish_reason)


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 1.2, "seed": 3}], ids=["greedy", "drawn"])
def test_a_real_models_answer_ends_at_the_same_stop_string_from_every_cut(llm, options):
    prompt = llm.get_tokenizer().encode("the prompt")
    free, text = answer_of(llm, prompt, SamplingParams(max_tokens=40, ignore_eos=True, **options))
    # A stop string of characters from several tokens, some way in.
    stop = llm.get_tokenizer().decode(free)[12:15]
    params = SamplingParams(max_tokens=40, ignore_eos=True, stop=[stop], repetition_penalty=1.0, **options)
    whole, text = answer_of(llm, prompt, params)
    assert stop not in text
    assert 3 < len(whole) < 40
    for cut in range(len(whole) + 1):
        assert answer_of(llm, prompt, params, whole[:cut]) == (whole, text)
