"""Thinking in messages of their own: answers are the final one, held or free, wherever they are cut."""

from dataclasses import replace

import pytest

from headrace.engine.errors import InvalidRequestError
from headrace.engine.request import Request, RequestOutputKind
from headrace.engine.sampling_params import SamplingParams
from headrace.engine.structured.harmony import HarmonyTokens
from headrace.engine.structured.reasoning import Split, ThinkingStage

from ..fakes import CONTEXT, fake_answer, make_engine
from ..running import run_all, token_ids

CHANNEL, MESSAGE, START, END, ROLE, FINAL = 8, 9, 10, 7, 6, 5
# The analysis' name is two tokens.
THOUGHT = (4, 3)
RECIPIENT = (1, 2)
TOKENS = HarmonyTokens(
    CHANNEL,
    END,
    message_token_id=MESSAGE,
    begin_token_id=START,
    role_token_ids=(ROLE,),
    thought_token_ids=THOUGHT,
    answer_token_ids=(FINAL,),
    recipient_token_ids=RECIPIENT,
)
OPENING = (CHANNEL, *THOUGHT, MESSAGE)
HEADER = (CHANNEL, FINAL, MESSAGE)
CLOSING = (END, START, ROLE, *HEADER)
ASKED = (1, 2, END, START, ROLE)
CHOICES = ((1, 2, 3), (1, 2, 4), (5,), (6, 1))
CHOOSING = SamplingParams(temperature=1.0, seed=3, max_tokens=9, choices=["a", "b", "c", "d"], reasoning=True)
PROMPTS = [list(ASKED), [1, START, 2, MESSAGE, 3, END, START, ROLE], [2] * 17 + [START, ROLE], [5, 1, START, ROLE]]


@pytest.mark.parametrize(
    ("prompt", "stage"),
    [
        (ASKED, ThinkingStage.NOT_BEGUN),
        ((1, 2), ThinkingStage.NOT_BEGUN),
        ((), ThinkingStage.NOT_BEGUN),
        ((*ASKED, *OPENING), ThinkingStage.OPEN),
        ((*ASKED, *OPENING, 1, 2), ThinkingStage.OPEN),
        ((*ASKED, *HEADER), ThinkingStage.DONE),
        ((*ASKED, *OPENING, 1, *CLOSING), ThinkingStage.DONE),
        # What a tool answered, and what was said before, are other messages.
        ((START, 3, *RECIPIENT, ROLE, CHANNEL, 4, MESSAGE, 6, END, START, ROLE), ThinkingStage.NOT_BEGUN),
        ((START, ROLE, *HEADER, 1, END, *ASKED), ThinkingStage.NOT_BEGUN),
    ],
)
def test_how_far_a_prompt_has_come(prompt, stage):
    assert TOKENS.stage(prompt) is stage


@pytest.mark.parametrize(
    ("prompt", "tokens", "expected"),
    [
        (ASKED, (*OPENING, 1, 2, *CLOSING, 1, 2), Split((1, 2), (1, 2), 12)),
        ((*ASKED, *OPENING), (1, *CLOSING, 2), Split((1,), (2,), 7)),
        # At once, or what a template began.
        (ASKED, (*HEADER, 1, 2), Split((), (1, 2), 3)),
        ((*ASKED, *HEADER), (1, 2), Split((), (1, 2), 0)),
        # Cut in each part.
        (ASKED, (), Split((), (), 0)),
        (ASKED, OPENING[:2], Split((), (), 2)),
        (ASKED, (*OPENING, 1), Split((1,), (), 5)),
        (ASKED, (*OPENING, 1, *CLOSING[:4]), Split((1,), (), 9)),
        # Several messages before the final one, and one whose header says more than its channel.
        (ASKED, (*OPENING, 1, END, START, ROLE, CHANNEL, 2, MESSAGE, 3, *CLOSING, 1), Split((1, 3), (1,), 18)),
        (ASKED, (*OPENING, 1, END, START, ROLE, CHANNEL, FINAL, 2, MESSAGE, 3), Split((1,), (3,), 12)),
        # One to a tool, which its header names behind the channel or in front of it.
        (ASKED, (*OPENING, 1, END, START, ROLE, CHANNEL, 4, 1, 2, 3, MESSAGE, 6), Split((1,), (3, MESSAGE, 6), 12)),
        (ASKED, (*OPENING, END, START, ROLE, 1, 2, CHANNEL, 4, MESSAGE, 6), Split((), (CHANNEL, 4, MESSAGE, 6), 9)),
        (ASKED, (CHANNEL, 4, 1, 2, 3), Split((), (3,), 4)),
        (ASKED, (CHANNEL, 4, 1, MESSAGE, 2, 3), Split((2, 3), (), 6)),
        # The channel's name within a message is a word like others.
        (ASKED, (*OPENING, FINAL, *CLOSING, FINAL, 1), Split((FINAL,), (FINAL, 1), 11)),
        # What begins with no header.
        (ASKED, (1, 2, *CLOSING), Split((), (1, 2, *CLOSING), 0)),
    ],
)
@pytest.mark.parametrize("is_held", [False, True])
def test_an_answer_is_the_final_message(prompt, tokens, expected, is_held):
    assert TOKENS.split(prompt, tokens, is_held) == expected
    tracker = TOKENS.tracker(prompt, is_held)
    told = [(token, tracker.add(token), tracker.is_marker, tracker.is_between) for token in tokens]
    assert tuple(token for token, is_thought, *_ in told if not is_thought) == expected.answer
    assert tuple(token for token, is_thought, is_marker, _ in told if is_thought and not is_marker) == (
        expected.reasoning
    )
    assert not any(is_between for *_, is_between in told)
    assert tracker.num_reasoning == expected.num_reasoning
    done = expected.answer or TOKENS.stage(prompt) is ThinkingStage.DONE
    assert not (done and tracker.is_thinking)


def choosing(name: str, prompt: list[int], params: SamplingParams = CHOOSING, **fields) -> Request:
    return Request(name, prompt, params, CHOICES, reasoning=TOKENS, **fields)


@pytest.mark.parametrize("budget", [None, 0, 1, 4])
@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": False}, {"max_num_batched_tokens": 3}])
def test_choices_are_scored_in_the_final_message(options, budget):
    params = replace(CHOOSING, thinking_token_budget=budget)
    engine, _ = make_engine(**options)
    events = run_all(engine, [choosing(str(place), prompt, params) for place, prompt in enumerate(PROMPTS)])
    for place, prompt in enumerate(PROMPTS):
        said, last = tuple(token_ids(events[str(place)])), events[str(place)][-1]
        assert last.choice_index is not None
        thinking = said[: len(said) - len(CHOICES[last.choice_index])]
        assert thinking[: len(OPENING)] == OPENING
        assert thinking[-len(CLOSING) :] == CLOSING
        thought = thinking[len(OPENING) : -len(CLOSING)]
        assert len(thought) <= (9 if budget is None else budget)
        assert not {0, END, START, CHANNEL, MESSAGE} & set(thought)
        plain = replace(params, reasoning=False, thinking_token_budget=None)
        alone = run_all(make_engine()[0], [Request("a", [*prompt, *thinking], plain, CHOICES)])["a"][-1]
        assert (last.choice_index, last.choice_probabilities) == (alone.choice_index, alone.choice_probabilities)


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_an_answer_goes_on_from_wherever_it_was_cut(kind):
    whole = run_all(make_engine()[0], [choosing("r", PROMPTS[1])])["r"]
    said = token_ids(whole)
    assert whole[-1].choice_index is not None
    for cut in (*range(len(said) - len(CHOICES[whole[-1].choice_index]) + 1), len(said)):
        request = choosing("r", PROMPTS[1], output_kind=kind, resume_token_ids=said[:cut])
        events = run_all(make_engine()[0], [request])["r"]
        assert said[:cut] + token_ids(events) == said
        assert events[-1].choice_probabilities == whole[-1].choice_probabilities


def test_a_prompt_that_has_begun_the_answer_is_followed_by_the_choice():
    prompt = [*ASKED, *HEADER]
    event = run_all(make_engine()[0], [choosing("r", prompt)])["r"][-1]
    plain = run_all(make_engine()[0], [Request("r", prompt, replace(CHOOSING, reasoning=False), CHOICES)])["r"][-1]
    assert event == plain
    assert len(event.new_token_ids) == len(CHOICES[event.choice_index or 0])


def test_a_budget_leads_on_to_the_final_message():
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=30, reasoning=True, ignore_eos=True)
    for budget in (0, 3):
        limited = replace(params, thinking_token_budget=budget)
        said = token_ids(run_all(make_engine()[0], [Request("r", list(ASKED), limited, reasoning=TOKENS)])["r"])
        split = TOKENS.split(ASKED, said)
        assert len(split.reasoning) <= budget
        assert split.num_reasoning == len(OPENING) + len(split.reasoning) + len(CLOSING)
        assert len(split.answer) == 30 - split.num_reasoning
    # Without one nothing is changed.
    request = Request("r", list(ASKED), params, reasoning=TOKENS)
    assert token_ids(run_all(make_engine()[0], [request])["r"]) == fake_answer(request, CONTEXT)


def test_what_cannot_be_is_refused():
    engine, _ = make_engine()
    outside = replace(TOKENS, role_token_ids=(11,))
    with pytest.raises(InvalidRequestError, match=r"reasoning: .*outside the vocabulary"):
        engine.add(Request("r", [1], SamplingParams(reasoning=True), reasoning=outside))
    room = len(OPENING) + len(CLOSING) + 1 + 3
    with pytest.raises(InvalidRequestError, match="leaves no room for reasoning"):
        engine.add(choosing("r", [1] * (CONTEXT - room + 1)))
    assert run_all(engine, [choosing("s", [1] * (CONTEXT - room))])["s"][-1].choice_index is not None
