"""A worker's live requests: each stream is the engine's answer, whatever else it serves."""

from typing import Any

import pytest

from headrace.engine.request import Request
from headrace.engine.sampling_params import SamplingParams

from ...engine.fakes import CONTEXT, VOCAB_SIZE
from ..answers import WAIT_SECONDS
from .desk import SAMPLING, error_of, when_told


def test_the_stream_is_the_answer(desk, wait_until, ends):
    with desk.worker() as worker:
        request = desk.submitted()
        assert desk.requests.num_waiting(desk.queue) == 1
        worker.live.ring(request.id)
        desk.assert_streamed(request)
        ends(request)
        assert desk.requests.num_waiting(desk.queue) == 0
        wait_until(lambda: worker.live.num_in_flight == 0, "it is forgotten")


def test_tokens_come_one_by_one(desk, wait_until):
    with desk.worker() as worker:
        worker.runner.close()
        request = desk.submitted()
        worker.live.ring(request.id)
        for count in range(1, 4):
            worker.runner.permit(1)
            wait_until(lambda count=count: desk.num_streamed(request.id) == count, f"token {count} is streamed")
        worker.runner.open()
        events = desk.assert_streamed(request)
        assert [len(event.token_ids) for event in events[:3]] == [1, 1, 1]


def test_many_at_a_time(desk):
    with desk.worker() as worker:
        requests = [desk.submitted(1 + number % 10, 2, seed=number) for number in range(40)]
        for request in requests:
            worker.live.ring(request.id)
        for request in requests:
            desk.assert_streamed(request)


def test_each_sample_has_its_stream(desk, ends):
    with desk.worker() as worker:
        request = desk.submitted(n=3)
        worker.live.ring(request.id)
        answers = [desk.assert_streamed(request, sample) for sample in range(3)]
        assert request.stream_ids == (request.id, f"{request.id}/1", f"{request.id}/2")
        assert len({tuple(event.token_ids for event in events) for events in answers}) == 3
        ends(request)


def test_logprobs_come_with_their_tokens(desk):
    with desk.worker() as worker:
        request = desk.submitted(logprobs=True, top_logprobs=2)
        worker.live.ring(request.id)
        events = desk.assert_streamed(request)
        items = [item for event in events[:-1] for item in event.logprobs]
        assert [item["token_id"] for item in items] == desk.tokens(request)
        assert all(len(item["top"]) == 2 and item["logprob"] < 0 for item in items)


def test_a_choice_comes_whole(desk):
    with desk.worker() as worker:
        request = desk.request(temperature=0.0, choices=["a b", "b c d"])
        request = request.model_copy(update={"sampling": request.sampling.model_copy(update={"ignore_eos": False})})
        desk.requests.submit(request)
        worker.live.ring(request.id)
        events = desk.events(request.id)
        assert "".join(event.text for event in events) in request.choices
        assert events[-1].finish_reason == "stop"


def test_a_stop_string_is_not_streamed(desk):
    with desk.worker() as worker:
        plain = desk.request()
        words = desk.tokenizer.decode(desk.tokens(plain)).split()
        stop = " ".join(words[4:6])
        request = desk.submitted(stop=(stop,))
        worker.live.ring(request.id)
        events = desk.events(request.id)
        text = "".join(event.text for event in events)
        assert text == " ".join(words).partition(stop)[0]
        assert (events[-1].finish_reason, events[-1].stop_reason) == ("stop", stop)
        assert all(stop not in event.text for event in events)


def test_what_may_be_said_and_what_is_written_out_of_it(desk):
    """A stop is part of the text, bad words are not said, nor what is not allowed, and special tokens are shown."""
    with desk.worker() as worker:

        def said(**more: Any) -> str:
            request = desk.submitted(**{"max_tokens": 8, "temperature": 0.0} | more)
            worker.live.ring(request.id)
            return "".join(event.text for event in desk.events(request.id))

        words = said().split()
        stop = " ".join(words[4:6])
        assert said(stop=(stop,), include_stop_str_in_output=True) == " ".join(words).partition(stop)[0] + stop
        assert said(allowed_token_ids=[1], ignore_eos=True) == "a a a a a a a a"
        assert said(bad_words=[words[0], "a"]).split()[0] not in (words[0], "a")
        # Nothing but a, b and c, in this order, is likely.
        only = {"logit_bias": {1: 100.0, 2: 60.0, 3: 30.0}}
        assert said(**only, bad_words=["a a a", "a a b"]) == "a a c a a c a a"
        assert said(logit_bias={0: 100.0}) == ""
        assert said(logit_bias={0: 100.0}, skip_special_tokens=False, max_tokens=2) == "<end> <end>"


@pytest.mark.parametrize(
    ("prompt", "code"),
    [((1,) * CONTEXT, "context_length_exceeded"), ((VOCAB_SIZE,), "invalid_request")],
    ids=["too long", "no such token"],
)
def test_what_the_engine_refuses(prompt, code, desk, ends):
    with desk.worker() as worker:
        request = desk.submitted(*prompt, n=2)
        worker.live.ring(request.id)
        assert [error_of(desk, stream_id) for stream_id in request.stream_ids] == [code, code]
        ends(request)
        assert worker.runner.num_sequences_started == 0


def test_live_requests_go_before_bulk_rows(desk, wait_until, monkeypatch):
    """Every seat is taken: the request has its first token with the very next step."""
    with desk.worker(max_num_seqs=4) as worker:
        worker.runner.close()
        params = SamplingParams(**SAMPLING | {"max_tokens": 30})
        rows = [Request(f"row {row}", (1 + row, 2), params) for row in range(4)]
        worker.host.submit(rows, lambda _: None)
        worker.runner.wait_until_reached()
        submitted = when_told(worker.host, "submit", monkeypatch)
        request = desk.submitted()
        worker.live.ring(request.id)
        assert submitted.wait(WAIT_SECONDS), "the engine's host has it"
        # The first of these steps began before the request came.
        worker.runner.permit(2)
        wait_until(lambda: desk.num_streamed(request.id) == 1, "its first token is streamed")
        assert worker.host.stats.num_steps == 2
        worker.runner.open()
        desk.assert_streamed(request)


def test_a_grammar_that_the_models_tokens_can_not_spell_ends_its_request(desk, ends):
    """Only the worker, which has the model's tokenizer, can find that out; the other requests do not notice."""
    with desk.worker() as worker:
        refused = desk.submitted(structured_outputs={"regex": "[0-9]{3}"}, ignore_eos=False, n=2)
        fine = desk.submitted()
        for request in (refused, fine):
            worker.live.ring(request.id)
        assert [error_of(desk, stream_id) for stream_id in refused.stream_ids] == ["invalid_request"] * 2
        desk.assert_streamed(fine)
        ends(refused)


def test_a_request_that_cannot_be_begun_ends_alone(desk, wait_until, ends, monkeypatch):
    with desk.worker() as worker:
        bad, good = desk.submitted(), desk.submitted()
        submit = worker.host.submit

        def submit_good(requests, *sinks):
            if requests[0].request_id.startswith(bad.id):
                raise RuntimeError("not this one")
            submit(requests, *sinks)

        monkeypatch.setattr(worker.host, "submit", submit_good)
        for request in (bad, good):
            worker.live.ring(request.id)
        desk.assert_streamed(good)
        assert error_of(desk, bad.id) == "internal_error"
        ends(bad)
        wait_until(lambda: worker.live.num_in_flight == 0, "both are forgotten")


def test_usage_tells_nobody_what_another_tenant_has_asked(desk):
    """Whoever guesses another's prompt would see it in `cached_tokens`, block by block."""
    prompt = [*range(1, 11)] * 2

    def cached_tokens(tenant):
        request = desk.submitted(*prompt, tenant=tenant)
        worker.live.ring(request.id)
        return desk.assert_streamed(request)[-1].usage.cached_tokens

    with desk.worker(enable_prefix_caching=True) as worker:
        tenants = ["default", "acme", "other"]
        assert [cached_tokens(tenant) for tenant in tenants + tenants] == [0] * 3 + [16] * 3


def test_the_next_turn_of_a_conversation_goes_on_from_a_state(desk):
    """With a model whose layers have states; of the first turn's 42 tokens the last two are its template's."""

    def cached_tokens(*prompt):
        request = desk.submitted(*prompt, max_tokens=4)
        worker.live.ring(request.id)
        return desk.assert_streamed(request)[-1].usage.cached_tokens

    with desk.worker(enable_prefix_caching=True, num_states=20) as worker:
        first = [1 + place % 7 for place in range(40)]
        assert cached_tokens(*first, 8, 9) == 0
        assert cached_tokens(*first, 3, 3, 3, 3, 10, 5, 5, 8, 9) == 32
