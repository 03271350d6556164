"""What the engine computes, step by step, with a model that has no weights."""

import pytest

from headrace.engine.errors import ConfigError, InvalidRequestError
from headrace.engine.request import FinishReason, Request
from headrace.engine.sampling_params import SamplingParams

from ..fakes import CONTEXT, END_TOKEN_ID, VOCAB_SIZE, fake_answer, make_engine
from ..running import greedy_params, run_all, token_ids

PREFIX = [token % 10 + 1 for token in range(32)]


def test_requests_with_the_same_new_prefix_compute_it_once_when_admitted_together():
    engine, _ = make_engine()
    requests = [Request(name, [*PREFIX, tail], greedy_params(3)) for name, tail in (("a", 5), ("b", 6))]
    for request in requests:
        engine.add(request)
    first = {event.request_id: event for event in engine.step()}
    assert engine.stats.num_computed_tokens == len(PREFIX) + 2
    for request in requests:
        answer = fake_answer(request, engine.max_model_len)
        assert first[request.request_id].new_token_ids == (answer[0],)
    assert (first["a"].num_cached_tokens, first["b"].num_cached_tokens) == (0, len(PREFIX))


def test_a_prefix_longer_than_the_budget_is_computed_once_too():
    engine, _ = make_engine(max_num_batched_tokens=10)
    events = run_all(engine, [Request(str(tail), [*PREFIX, tail], greedy_params(1)) for tail in range(1, 6)])
    assert engine.stats.num_computed_tokens == len(PREFIX) + 5
    assert [events[str(tail)][-1].num_cached_tokens for tail in range(1, 6)] == [0, 32, 32, 32, 32]


def test_without_a_prefix_cache_every_request_computes_its_prompt():
    engine, _ = make_engine(enable_prefix_caching=False)
    events = run_all(engine, [Request(str(tail), [*PREFIX, tail], greedy_params(1)) for tail in range(1, 4)])
    assert engine.stats.num_computed_tokens == 3 * (len(PREFIX) + 1)
    assert {event.num_cached_tokens for each in events.values() for event in each} == {0}


def test_a_prompt_that_is_all_cached_still_computes_its_last_token():
    engine, _ = make_engine()
    for name, cached in (("first", 0), ("second", len(PREFIX) - 8)):
        events = run_all(engine, [Request(name, PREFIX, greedy_params(1))])[name]
        assert events[-1].num_cached_tokens == cached


def test_waiting_for_the_device_is_told():
    engine, _ = make_engine()
    assert engine.stats.waited_seconds == 0
    run_all(engine, [Request("a", PREFIX, greedy_params(2))])
    first = engine.stats.waited_seconds
    run_all(engine, [Request("b", PREFIX, greedy_params(2))])
    assert 0 < first < engine.stats.waited_seconds


def test_the_token_budget_bounds_every_step():
    engine, _ = make_engine(max_num_batched_tokens=7)
    for index in range(5):
        engine.add(Request(str(index), PREFIX[index:], greedy_params(4)))
    computed = 0
    while engine.has_work:
        engine.step()
        assert engine.stats.num_computed_tokens - computed <= 7
        computed = engine.stats.num_computed_tokens


def test_no_more_sequences_run_than_max_num_seqs():
    engine, _ = make_engine(max_num_seqs=2)
    for index in range(5):
        engine.add(Request(str(index), PREFIX[index:], greedy_params(4)))
    most = 0
    while engine.has_work:
        engine.step()
        most = max(most, engine.stats.num_running)
    assert most == 2


def test_the_first_come_is_the_first_served_and_the_last_to_be_preempted():
    """Six blocks: "a" comes to need five of them, "b" has to give way and comes back."""
    engine, _ = make_engine(num_blocks=6)
    requests = [Request("a", PREFIX[:8], greedy_params(30)), Request("b", PREFIX[3:11], greedy_params(30))]
    events = run_all(engine, requests)
    assert engine.stats.num_preemptions == 1
    for request in requests:
        assert token_ids(events[request.request_id]) == fake_answer(request, engine.max_model_len)


def test_a_step_that_preempts_admits_nobody():
    """Whoever has just given up blocks would take them back at once, and give them up again in the next step."""
    engine, _ = make_engine(num_blocks=5, max_num_batched_tokens=9, enable_prefix_caching=False)
    engine.add(Request("a", PREFIX[:12], greedy_params(20)))
    engine.add(Request("b", PREFIX[5:22], greedy_params(20)))
    while engine.stats.num_preemptions == 0:
        engine.step()
    assert (engine.stats.num_running, engine.stats.num_waiting) == (1, 1)


def test_least_recently_used_prefixes_are_evicted_from_their_end():
    """A prompt of four blocks takes the cache's free one and the last three of the older prompt's four."""
    engine, _ = make_engine(num_blocks=9)
    older, newer = PREFIX, PREFIX[::-1]
    for name, prompt in (("older", older), ("newer", newer)):
        run_all(engine, [Request(name, [*prompt, 1], greedy_params(1))])
    run_all(engine, [Request("evicts", [9, *PREFIX[:27]], greedy_params(1))])
    cached = [
        run_all(engine, [Request(name, [*prompt, 2], greedy_params(1))])[name][-1].num_cached_tokens
        for name, prompt in (("newer", newer), ("older", older))
    ]
    assert cached == [32, 8]


def test_an_aborted_request_is_never_heard_of_again_and_its_blocks_are_free():
    engine, _ = make_engine()
    engine.add(Request("goes", PREFIX, greedy_params(9)))
    engine.add(Request("stays", PREFIX[1:], greedy_params(9)))
    engine.step()
    assert engine.abort("goes")
    engine.check()
    assert not engine.abort("goes")
    events = []
    while engine.has_work:
        events += engine.step()
    assert {event.request_id for event in events} == {"stays"}


def test_of_many_choices_only_those_wait_that_are_next_in_turn():
    """With 15,000 choices each of a job's rows had 1,500 sequences made in one step: others waited for seconds."""
    choices = tuple((first, last) for first in range(1, 9) for last in (1, 2))
    params = SamplingParams(temperature=0, choices=[str(choice) for choice in choices])
    engine, _ = make_engine(max_num_seqs=2)
    requests = [Request(str(number), [*PREFIX, number], params, choices) for number in range(3)]
    for request in requests:
        engine.add(request)
    ended = []
    while engine.has_work:
        ended += engine.step()
        engine.check()
        assert engine.stats.num_waiting <= len(requests)
    assert sorted(event.request_id for event in ended) == ["0", "1", "2"]
    for event in ended:
        assert len(event.choice_probabilities or ()) == len(choices)


@pytest.mark.parametrize("num_steps", range(5))
def test_a_request_with_choices_can_be_aborted_between_any_two_steps(num_steps):
    """Its later nodes are queued when the first is known, and none of them may outlive it."""
    engine, _ = make_engine(max_num_batched_tokens=17, max_num_seqs=1)
    choices = ((1, 2), (1, 3), (2, 2), (2, 4, 1), (2, 4, 2))
    params = SamplingParams(temperature=0, choices=["a", "b", "c", "d", "e"])
    engine.add(Request("choices", PREFIX, params, choices))
    for _ in range(num_steps):
        assert engine.step() == []
    assert engine.abort("choices")
    engine.check()
    assert not engine.has_work
    assert engine.stats.num_waiting == engine.stats.num_running == 0


@pytest.mark.parametrize("stop", [END_TOKEN_ID, 3])
def test_generation_ends_at_a_stop_token_which_is_the_last_one(stop):
    engine, _ = make_engine()
    params = SamplingParams(seed=3, max_tokens=None, stop_token_ids=() if stop == END_TOKEN_ID else (stop,))
    requests = [Request(str(first), [first, 2], params) for first in range(1, 11)]
    answers = run_all(engine, requests)
    for request in requests:
        events = answers[request.request_id]
        answer = token_ids(events)
        assert answer == fake_answer(request, engine.max_model_len)
        stopped = events[-1].finish_reason is FinishReason.STOP
        assert stopped == (answer[-1] in {END_TOKEN_ID, stop})
        assert not {END_TOKEN_ID, stop} & set(answer[:-1])


def test_ignore_eos_goes_on_to_max_tokens_or_to_the_end_of_the_context():
    engine, _ = make_engine()
    for max_tokens, expected in ((50, 50), (None, CONTEXT - 2), (1000, CONTEXT - 2)):
        params = SamplingParams(seed=3, max_tokens=max_tokens, ignore_eos=True)
        events = run_all(engine, [Request("a", [1, 2], params)])["a"]
        assert events[-1].finish_reason is FinishReason.LENGTH
        assert len(token_ids(events)) == expected
        assert END_TOKEN_ID in token_ids(events)


BAD_REQUESTS = {
    "empty": (Request("bad", []), "prompt is empty"),
    "too long": (Request("bad", [1] * CONTEXT), f"prompt has {CONTEXT} tokens.*max_model_len"),
    "beyond the vocabulary": (Request("bad", [1, VOCAB_SIZE]), f"token id {VOCAB_SIZE} is outside"),
    "negative": (Request("bad", [-1, 1]), "token id -1 is outside"),
    "not a token id": (Request("bad", [1.5]), "whole numbers"),  # type: ignore[list-item]
    "huge": (Request("bad", [2**70]), "whole numbers"),
    "stop token": (Request("bad", [1], SamplingParams(stop_token_ids=[99])), "token id 99"),
    "choice token": (Request("bad", [1], choice_token_ids=((1,), (99,))), "token id 99"),
    "no choice": (Request("bad", [1], choice_token_ids=()), "choices must be"),
    "long choice": (Request("bad", [1], choice_token_ids=((1,) * CONTEXT, (2,))), "exceed max_model_len"),
    "id in use": (Request("good", [1]), "'good' is already in use"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_a_request_that_can_never_run_is_refused_when_added(name):
    engine, _ = make_engine()
    good = Request("good", PREFIX, greedy_params(4))
    engine.add(good)
    bad, message = BAD_REQUESTS[name]
    with pytest.raises(InvalidRequestError, match=message) as caught:
        engine.add(bad)
    assert "\n" not in str(caught.value)
    events = []
    while engine.has_work:
        events += engine.step()
    assert token_ids(events) == fake_answer(good, engine.max_model_len)


def test_the_context_shrinks_to_what_the_kv_memory_holds():
    engine, _ = make_engine(num_blocks=3)
    assert engine.max_model_len == 24
    with pytest.raises(InvalidRequestError, match="prompt has 24 tokens"):
        engine.add(Request("a", PREFIX[:24]))
    events = run_all(engine, [Request("a", PREFIX[:23], greedy_params(None))])["a"]
    assert len(token_ids(events)) == 1


@pytest.mark.parametrize(
    ("max_model_len", "message"), [(65, "exceeds the model's context of 64"), (25, "needs 4 KV blocks of 8")]
)
def test_a_max_model_len_that_cannot_be_had_is_refused(max_model_len, message):
    with pytest.raises(ConfigError, match=message):
        make_engine(num_blocks=3, max_model_len=max_model_len)
