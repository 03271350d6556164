"""Log-probabilities of a prompt's tokens: beside the first token of its answer, whatever becomes of worker or Redis."""

import pytest
from redis import Redis

from headrace.engine.errors import InvalidRequestError
from headrace.jobs.live import prompt
from headrace.jobs.live.asking import LiveStreams, new_request
from headrace.jobs.streams.keys import stream_key
from headrace.jobs.streams.reader import follow

from .desk import PROMPT, stop_after


def test_they_come_with_the_first_token_of_the_first_sample(desk):
    with desk.worker() as worker:
        request = desk.submitted(n=2, prompt_logprobs=1)
        worker.live.ring(request.id)
        (begin, *rest), others = (desk.assert_streamed(request, sample) for sample in range(2))
        of_first, *of_rest = begin.prompt_logprobs
        assert [entry["token_id"] for entry in begin.prompt_logprobs] == list(PROMPT)
        assert (of_first["logprob"], of_first["top"]) == (None, [])
        assert all(entry["logprob"] < 0 and len(entry["top"]) == 1 for entry in of_rest)
        assert {event.prompt_logprobs for event in (*rest, *others)} == {None}
        # Who has the first token has them too.
        assert desk.events(request.id, 1)[0].prompt_logprobs is None
        generated = LiveStreams(desk.url, desk.requests).collect(request)
        assert [each.prompt_logprobs for each in generated.outputs] == [begin.prompt_logprobs, None]


def test_they_outlive_the_worker_and_the_stream(desk, wait_until):
    with desk.worker(lease_seconds=0.0) as slow, desk.worker() as heir:
        slow.runner.close()
        heir.runner.close()
        request = desk.submitted(prompt_logprobs=0)
        slow.live.ring(request.id)
        stop_after(desk, slow, request, 2, wait_until)
        begin = next(follow(desk.url, request.id))
        heir.live.ring(request.id)
        heir.runner.wait_until_reached()
        with Redis.from_url(desk.url) as redis:
            redis.delete(stream_key(request.id))
        heir.runner.open()
        events = desk.assert_streamed(request)
        assert events[0].prompt_logprobs == begin.prompt_logprobs
        assert [entry["token_id"] for entry in begin.prompt_logprobs or ()] == list(PROMPT)


def test_more_of_them_than_redis_is_to_hold_are_refused(model, monkeypatch):
    monkeypatch.setattr(prompt, "MAX_PROMPT_LOGPROBS", 12)
    with pytest.raises(InvalidRequestError, match="shorten the prompt") as refused:
        new_request("Where is my parcel?", model, prompt_logprobs=20)
    assert refused.value.field == "prompt_logprobs"
