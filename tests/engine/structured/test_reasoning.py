"""Thinking before the answer: where it ends, and that the answer is what it would be if the prompt had ended there."""

from dataclasses import replace

import pytest

from headrace.engine.errors import InvalidRequestError
from headrace.engine.request import FinishReason, Request, RequestEvent, RequestOutputKind
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.structured.reasoning import ReasoningTokens, Split, ThinkingTracker

from ..fakes import CONTEXT, fake_answer, make_engine
from ..running import run_all, token_ids

START, END, BREAK = 8, 9, 10
TOKENS = ReasoningTokens(START, END, (BREAK, BREAK))
CHOICES = ((1, 2, 3), (1, 2, 4), (5,), (6, 1))
CHOOSING = SamplingParams(temperature=1.0, seed=3, max_tokens=9, choices=["a", "b", "c", "d"], reasoning=True)
PROMPTS = [[1, 2, 3, START], [7, 7, START, 5, 5], [4] * 17, [3, 1, START], [5, 2, 6, 1, 1, START, 6], [2] * 9]


def choosing(name: str, prompt: list[int], params: SamplingParams = CHOOSING, **fields) -> Request:
    return Request(name, prompt, params, CHOICES, reasoning=TOKENS, **fields)


def chosen(last: RequestEvent) -> tuple[int, ...]:
    assert last.choice_index is not None
    return CHOICES[last.choice_index]


def scored_alone(prompt: list[int], params: SamplingParams = CHOOSING):
    """The last event of a request whose prompt ends where the choice begins."""
    plain = replace(params, reasoning=False, thinking_token_budget=None)
    engine, _ = make_engine()
    return run_all(engine, [Request("alone", prompt, plain, CHOICES)])["alone"][-1]


@pytest.mark.parametrize(
    ("prompt", "tokens", "expected"),
    [
        ((1, START), (2, 3, END, 4), Split((2, 3), (4,), 3)),
        ((1, START, 7, 7), (2, END), Split((2,), (), 2)),
        ((1, START), (2, 3), Split((2, 3), (), 2)),
        ((1, START), (), Split((), (), 0)),
        ((1, START, END, 7, 7), (2, 3), Split((), (2, 3), 0)),
        ((START, 1, END, 7, 7, 7), (2, 3), Split((), (2, 3), 0)),
        ((1,), (7, START, 2, END, 4), Split((2,), (4,), 4)),
        ((1,), (START, 2), Split((2,), (), 2)),
        ((1,), (2, END, 4), Split((), (2, END, 4), 0)),
        ((1, START), (2, END, START, 3, END), Split((2,), (START, 3, END), 2)),
        ((1, START), (END, START, 3, END), Split((), (START, 3, END), 1)),
        ((1,), (2, 3, 4, 5, START), Split((), (2, 3, 4, 5, START), 0)),
    ],
)
def test_an_answer_parts_where_the_thinking_ends(prompt, tokens, expected):
    assert TOKENS.split(prompt, tokens) == expected
    tracker = ThinkingTracker(TOKENS, prompt)
    answer = tuple(token for token in tokens if not tracker.add(token))
    assert answer[len(answer) - len(expected.answer) :] == expected.answer
    assert tracker.num_reasoning == expected.num_reasoning


@pytest.mark.parametrize(("prompt", "begin"), [((1, START), ()), ((1,), (START,))])
@pytest.mark.parametrize("num_tokens", range(6))
def test_the_break_before_a_held_answer_is_of_neither_part(prompt, begin, num_tokens):
    tokens = (*begin, 2, END, BREAK, BREAK, BREAK, 4)[: len(begin) + num_tokens]
    num_reasoning = min(len(begin) + 2, len(tokens))
    expected = Split((2,)[:num_tokens], (BREAK, 4)[: max(0, num_tokens - 4)], num_reasoning)
    assert TOKENS.split(prompt, tokens, is_held=True) == expected
    tracker = ThinkingTracker(TOKENS, prompt, is_held=True)
    answer = tuple(token for token in tokens if not tracker.add(token) and not tracker.is_between)
    assert (answer, tracker.num_reasoning) == (expected.answer, num_reasoning)


LABELLED = ReasoningTokens(START, END, label_token_ids=(6, 7), switch_token_id=5)


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize(
    ("prompt", "tokens", "expected"),
    [
        ((5, 1), (START, 6, 7, 2, 6, END, 4), Split((2, 6), (4,), 6)),
        ((5, 1), (START, 6, 2, END, 4), Split((2,), (4,), 4)),
        ((5, 1), (START, 7, 6, END), Split((7, 6), (), 4)),
        ((5, 1), (START, 6, 7), Split((), (), 3)),
        ((5, 1), (START, END, 4), Split((), (4,), 2)),
        ((5, START, 6, 7), (6, 7, END, 4), Split((6, 7), (4,), 3)),
        ((5, START, 6, 7, END), (2, 3), Split((), (2, 3), 0)),
    ],
)
def test_what_the_thinking_is_labelled_with_is_no_thought(prompt, tokens, expected, is_held):
    assert LABELLED.split(prompt, tokens, is_held) == expected
    tracker = ThinkingTracker(LABELLED, prompt, is_held)
    told = [(token, tracker.add(token), tracker.is_marker) for token in tokens]
    thought = tuple(token for token, is_thought, is_marker in told if is_thought and not is_marker)
    assert (thought, tracker.num_reasoning) == (expected.reasoning, expected.num_reasoning)


def test_a_held_answer_is_thought_about_where_the_prompt_has_the_switch():
    for prompt, begin in (((5, 1), [START, 6, 7]), ((1, 2), [])):
        request = Request("r", [*prompt], CHOOSING, CHOICES, reasoning=LABELLED)
        events = run_all(make_engine()[0], [request])["r"]
        said = token_ids(events)
        assert said[: len(begin)] == begin
        assert (END in said) == bool(begin)
        assert LABELLED.split(prompt, said, is_held=True).answer == chosen(events[-1])
    # One that is not held may be thought about unasked.
    assert LABELLED.split((1, 2), (START, 6, 7, END, 4)) == Split((), (4,), 4)


@pytest.mark.parametrize("budget", [None, 0, 1, 4])
@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": False}, {"max_num_batched_tokens": 3}])
def test_choices_are_scored_after_the_thinking(options, budget):
    params = replace(CHOOSING, thinking_token_budget=budget)
    engine, _ = make_engine(**options)
    events = run_all(engine, [choosing(str(place), prompt, params) for place, prompt in enumerate(PROMPTS)])
    for place, prompt in enumerate(PROMPTS):
        said, last = token_ids(events[str(place)]), events[str(place)][-1]
        thinking = said[: len(said) - len(chosen(last))]
        begin = 0 if START in prompt[-3:] else 1
        assert thinking[:begin] == [START] * begin
        assert thinking[-3:] == [END, BREAK, BREAK]
        assert thinking.index(END) - begin <= (9 if budget is None else budget)
        assert 0 not in thinking
        alone = scored_alone([*prompt, *thinking], params)
        assert (last.choice_index, last.choice_probabilities) == (alone.choice_index, alone.choice_probabilities)
        assert last.finish_reason is FinishReason.STOP


def test_memory_for_few_of_them_changes_nothing():
    requests = [choosing(str(place), prompt) for place, prompt in enumerate(PROMPTS)]
    quiet, tight = make_engine()[0], make_engine(num_blocks=6, max_model_len=48)[0]
    expected, found = run_all(quiet, requests), run_all(tight, requests)
    assert tight.stats.num_preemptions
    for name, events in expected.items():
        assert token_ids(found[name]) == token_ids(events)
        assert found[name][-1].choice_probabilities == events[-1].choice_probabilities


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_an_answer_goes_on_from_wherever_it_was_cut(kind):
    whole = run_all(make_engine()[0], [choosing("r", PROMPTS[1])])["r"]
    said = token_ids(whole)
    num_thought = len(said) - len(chosen(whole[-1]))
    for cut in (*range(num_thought + 1), len(said)):
        request = choosing("r", PROMPTS[1], output_kind=kind, resume_token_ids=said[:cut])
        events = run_all(make_engine()[0], [request])["r"]
        assert said[:cut] + token_ids(events) == said
        assert events[-1].choice_probabilities == whole[-1].choice_probabilities
    with pytest.raises(InvalidRequestError, match="none of the choices"):
        make_engine()[0].add(choosing("r", PROMPTS[1], resume_token_ids=[*said[:num_thought], 7]))


def test_what_was_thought_is_known_before_the_choice():
    engine, _ = make_engine()
    request = choosing("r", PROMPTS[1], output_kind=RequestOutputKind.FINAL_ONLY)
    said = token_ids(run_all(make_engine()[0], [request])["r"])
    engine.add(request)
    seen = []
    while engine.has_work:
        engine.step()
        seen.append(len(engine.untold("r")[0]))
        assert list(engine.untold("r")[0]) == said[: seen[-1]]
    assert sorted(seen[:-1]) == seen[:-1]
    assert max(seen) == said.index(END) + 3


def test_one_choice_alone_needs_no_scoring():
    params = replace(CHOOSING, choices=["a"])
    for kind in RequestOutputKind:
        request = Request("r", PROMPTS[0], params, ((5, 6),), reasoning=TOKENS, output_kind=kind)
        events = run_all(make_engine()[0], [request])["r"]
        assert token_ids(events)[-5:] == [END, BREAK, BREAK, 5, 6]
        assert events[-1].choice_probabilities == (1.0,)


def test_a_stop_token_does_not_end_the_thinking_before_a_held_answer():
    free = token_ids(run_all(make_engine()[0], [choosing("r", PROMPTS[4])])["r"])
    stops = sorted({*free[: free.index(END)]})
    assert stops
    params = replace(CHOOSING, stop_token_ids=tuple(stops))
    events = run_all(make_engine()[0], [choosing("r", PROMPTS[4], params)])["r"]
    said = token_ids(events)
    assert not {*stops} & {*said[: said.index(END)]}
    assert tuple(said[said.index(END) + 3 :]) == chosen(events[-1])


def test_a_stop_token_that_ends_the_thinking_leaves_no_room_for_a_held_answer():
    engine, _ = make_engine()
    with pytest.raises(InvalidRequestError, match="stop_token_ids: 9 ends the reasoning"):
        engine.add(choosing("r", PROMPTS[4], replace(CHOOSING, stop_token_ids=(END,))))
    free = replace(CHOOSING, choices=None, stop_token_ids=(END,), max_tokens=40)
    said = token_ids(run_all(engine, [Request("r", PROMPTS[4], free, reasoning=TOKENS)])["r"])
    assert END not in said[:-1]


def test_what_was_cached_is_told_of_an_answer_that_goes_on_after_its_thinking():
    engine, _ = make_engine()
    whole = run_all(engine, [choosing("r", PROMPTS[4])])["r"]
    said = token_ids(whole)
    num_thought = len(said) - len(chosen(whole[-1]))
    for cut in (num_thought - 1, num_thought):
        request = choosing("r", PROMPTS[4], resume_token_ids=said[:cut])
        assert run_all(engine, [request])["r"][-1].num_cached_tokens > 0


def test_a_prompt_that_has_ended_the_thinking_is_followed_by_the_choice():
    prompt = [1, 2, START, END, 7]
    event = run_all(make_engine()[0], [choosing("r", prompt)])["r"][-1]
    assert event == scored_alone(prompt)._replace(request_id="r")


def test_a_budget_ends_the_thinking_and_the_answer_is_free():
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=20, reasoning=True, ignore_eos=True)
    for budget in (0, 3, 7):
        limited = replace(params, thinking_token_budget=budget)
        request = Request("r", [1, START], limited, reasoning=TOKENS)
        said = token_ids(run_all(make_engine()[0], [request])["r"])
        assert len(said) == 20
        assert said.index(END) <= budget
    # Without one nothing is changed.
    request = Request("r", [1, START], params, reasoning=TOKENS)
    assert token_ids(run_all(make_engine()[0], [request])["r"]) == fake_answer(request, CONTEXT)


def test_what_cannot_be_is_refused():
    engine, _ = make_engine()
    with pytest.raises(InvalidRequestError, match="thinking_token_budget has no meaning without reasoning"):
        SamplingParams(thinking_token_budget=3)
    with pytest.raises(InvalidRequestError, match="thinking_token_budget must be ≥ 0, not -1"):
        SamplingParams(reasoning=True, thinking_token_budget=-1)
    with pytest.raises(InvalidRequestError, match=r"reasoning needs Request\.reasoning"):
        engine.add(Request("r", [1], SamplingParams(reasoning=True)))
    with pytest.raises(InvalidRequestError, match="outside the vocabulary"):
        engine.add(Request("r", [1], SamplingParams(reasoning=True), reasoning=ReasoningTokens(8, 11)))
    with pytest.raises(InvalidRequestError, match="leaves no room for reasoning"):
        engine.add(choosing("r", [1] * (CONTEXT - 5)))
