"""Live requests over Redis and Celery to worker processes, which are killed and told to stop in mid answer."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from redis import Redis

from headrace.engine.errors import ConfigError
from headrace.engine.sampling_params import SamplingParams
from headrace.jobs.broker.celery_app import live_queue
from headrace.jobs.client.client import Client
from headrace.jobs.errors import SpecError
from headrace.jobs.live.asking import GenerationError
from headrace.jobs.live.keys import open_key, request_key
from headrace.jobs.live.requests import LiveRequest, LiveState, UnknownRequest
from headrace.jobs.settings import Settings
from headrace.jobs.spec.precision import Precision
from headrace.jobs.streams.reader import follow

from ..answers import WAIT_SECONDS
from ..running import MODEL, ROOT, environment
from .desk import PROMPT, Desk, opened_desk

NUM_TOKENS = 50


@pytest.fixture
def real_desk(valkey, model) -> Iterator[Desk]:
    with opened_desk(valkey, model, live_queue(str(model), Precision())) as desk:
        yield desk


@contextmanager
def workers(desk: Desk, folder: Path) -> "Iterator[tuple[subprocess.Popen[str], Path]]":
    """Worker processes, one after the other, and the file with their ids; what each begins is on their stdout."""
    pids = folder / "pids"
    env = environment(
        folder,
        HEADRACE_REDIS_URL=desk.url,
        # So long that no worker loses what it has for having stood still: there would be one more attempt.
        HEADRACE_LEASE_SECONDS="60",
        HEADRACE_TEST_STEP_SECONDS="0.02",
        HEADRACE_TEST_HOLD=str(folder / "hold"),
    )
    command = [sys.executable, "-m", "tests.jobs.forked_worker", str(desk.model), str(pids)]
    folder.mkdir(exist_ok=True)
    with subprocess.Popen(command, env=env, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process, pids
        finally:
            process.terminate()
            process.wait(WAIT_SECONDS)


# KEYS: request, open. ARGV: id. 1 once another attempt has it.
END_LEASE = """
if redis.call('HGET', KEYS[1], 'attempt') ~= '1' then return 1 end
redis.call('HSET', KEYS[1], 'lease', 0)
redis.call('ZADD', KEYS[2], 0, ARGV[1])
return 0
"""


def end_lease_of_first_attempt(desk: Desk, request: LiveRequest) -> bool:
    """A renewal may still come that was sent before its worker was killed: until there is another attempt."""
    with Redis.from_url(desk.url) as redis:
        return bool(redis.eval(END_LEASE, 2, request_key(request.id), open_key(desk.queue), request.id))


def begun(line: str) -> list[int]:
    return [int(token) for token in line.split()]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_the_next_worker_goes_on_after_the_last_token(signum, real_desk, tmp_path, wait_until):
    """No token is lost, none comes twice, and none that was streamed is generated again."""
    desk = real_desk
    with ExitStack() as stack:
        hold = tmp_path / "first/hold"
        hold.parent.mkdir()
        hold.touch()
        process, pids = stack.enter_context(workers(desk, tmp_path / "first"))
        request = desk.submitted(max_tokens=NUM_TOKENS, n=2)
        assert begun(process.stdout.readline()) == list(PROMPT)
        reader = follow(desk.url, request.id, timeout=WAIT_SECONDS)
        seen = list(next(reader).token_ids)
        while len(seen) < 5:
            seen += next(reader).token_ids
        if signum == signal.SIGKILL:
            os.kill(int(pids.read_text().split()[-1]), signal.SIGKILL)
            hold.unlink()
            # Nobody waits until its lease has run out.
            wait_until(lambda: end_lease_of_first_attempt(desk, request), "another has it")
        else:
            # The parent passes it on and starts no other: handed back or finished, as the grace allows.
            process.terminate()
            hold.unlink()
            assert process.wait(WAIT_SECONDS) == 0
            stack.enter_context(workers(desk, tmp_path / "second"))
        for sample in range(2):
            desk.assert_streamed(request, sample)
        rest = [token for event in reader for token in event.token_ids]
        assert seen + rest == desk.tokens(request)
        wait_until(lambda: desk.requests.get(request.id).state is LiveState.ENDED, "it has ended")
        if signum == signal.SIGKILL:
            again = [begun(process.stdout.readline()) for _ in range(2)]
            firsts = [list(PROMPT) + desk.tokens(request, sample) for sample in range(2)]
            for tokens in again:
                assert any(tokens == first[: len(tokens)] for first in firsts)
            assert max(map(len, again)) >= len(PROMPT) + len(seen)
            assert desk.requests.get(request.id).attempt == 2


def test_redis_restarts_in_mid_answer(real_desk, tmp_path):
    desk = real_desk
    with workers(desk, tmp_path):
        request = desk.submitted(max_tokens=NUM_TOKENS)
        reader = follow(desk.url, request.id, timeout=WAIT_SECONDS)
        seen = list(next(reader).token_ids)
        with Redis.from_url(desk.url) as redis:
            psutil.Process(redis.info("server")["process_id"]).kill()
        seen += [token for event in reader for token in event.token_ids]
        assert seen == desk.tokens(request)
        desk.assert_streamed(request)


@pytest.fixture(scope="module")
def client(served) -> Iterator[Client]:
    with Client(Settings.from_environment(environment(served))) as client:
        yield client


MESSAGES = [{"role": "user", "content": "My parcel never came, I want my money back."}]


def test_the_answer_is_the_engines(client, llm):
    plain: dict[str, Any] = {"max_tokens": 30, "ignore_eos": True}
    drawn: dict[str, Any] = {"n": 2, "temperature": 1.0, "seed": 11, "max_tokens": 9}
    stopped = plain | {"stop": [llm.chat(MESSAGES, SamplingParams(temperature=0.0, **plain))[0].outputs[0].text[3:6]]}
    for sampling in (plain, drawn, stopped):
        params = SamplingParams(**{"temperature": 0.0, **sampling})
        (expected,) = llm.chat(MESSAGES, params)
        answer = client.generate(MESSAGES, MODEL, start_worker=False, **sampling)
        for output, mine in zip(expected.outputs, answer.outputs, strict=True):
            assert (mine.text, mine.token_ids) == (output.text, output.token_ids)
            assert (mine.finish_reason, mine.stop_reason) == (output.finish_reason, output.stop_reason)
        usage = answer.outputs[0].usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (
            len(expected.prompt_token_ids),
            len(expected.outputs[0].token_ids),
        )


def test_a_text_is_a_users_message(client):
    text = MESSAGES[0]["content"]
    assert client.generate(text, MODEL).text == client.generate(MESSAGES, MODEL).text


async def _astreamed(client: Client, stream_id: str, after: int) -> list[int]:
    return [token async for event in client.astream(stream_id, after) for token in event.token_ids]


def test_streams_can_be_read_at_any_time_from_anywhere(client):
    request_id = client.ask(MESSAGES, MODEL, max_tokens=12, ignore_eos=True)
    tokens = [token for event in client.stream(request_id) for token in event.token_ids]
    assert len(tokens) == 12
    assert [token for event in client.stream(request_id, 5) for token in event.token_ids] == tokens[5:]
    assert asyncio.run(_astreamed(client, request_id, 7)) == tokens[7:]


def test_bad_requests_are_refused_at_once(client):
    with pytest.raises(ConfigError, match=r"^dtype must be one of"):
        client.ask(MESSAGES, MODEL, dtype="fp4")
    with pytest.raises(SpecError, match="temperature"):
        client.ask(MESSAGES, MODEL, temperature=-1)
    with pytest.raises(ValueError, match="non-empty list"):
        client.ask([], MODEL)
    with pytest.raises(ValueError, match="shorten it"):
        client.ask("word " * 5000, MODEL)


def test_an_error_is_raised(client, served):
    with pytest.raises(GenerationError, match="deadline") as raised:
        client.generate(MESSAGES, MODEL, start_worker=False, timeout_seconds=-1)
    assert raised.value.code == "deadline_exceeded"
    with pytest.raises(UnknownRequest):
        next(client.stream("req_" + "0" * 24))


def test_the_command_prints_the_answer_as_it_comes(client, served, headrace):
    request_id = client.ask(MESSAGES, MODEL, max_tokens=12, ignore_eos=True)
    text = "".join(event.text for event in client.stream(request_id))
    done = headrace(served, "stream", request_id)
    assert (done.status, done.out, done.err) == (0, f"{text}\n", "")
    lines = headrace(served, "stream", request_id, "--json", "--after", "4").out.splitlines()
    assert '"first": 5' in lines[0]
    assert '"finish_reason": "length"' in lines[-1]


def test_the_commands_exit_status(client, served, headrace):
    overdue = LiveRequest.new(
        queue=live_queue(str(MODEL), Precision()),
        model=str(MODEL),
        prompt_token_ids=PROMPT,
        sampling=client.live.get(client.ask(MESSAGES, MODEL)).request.sampling,
        timeout_seconds=-1,
    )
    client.live.submit(overdue)
    failed = headrace(served, "stream", overdue.id)
    assert (failed.status, failed.err) == (1, "headrace: the request's deadline has passed (deadline_exceeded)\n")
    unknown = headrace(served, "stream", "req_nothing")
    assert unknown.status == 2
    assert "there is no request req_nothing" in unknown.err


async def _answer(client: Client, stream_id: str) -> str:
    return "".join([event.text async for event in client.astream(stream_id)])


def test_a_bulk_rows_tokens_come_without_the_api(client, served, headrace, tmp_path):
    rows = [{"text": f"Where is order {number}?"} for number in range(8)]
    job = client.submit(rows, MODEL, tmp_path / "out", prompt="{text}", max_tokens=300, ignore_eos=True)
    # Before a worker has begun it, or later: nobody else asks for this row's tokens.
    events = list(client.stream(f"{job.id}/3"))
    job.wait(timeout=120, start_worker=False)
    output = job.results()["output"].to_pylist()
    assert "".join(event.text for event in events) == output[3]
    numbers = [event.first + place for event in events for place in range(len(event.token_ids))]
    assert numbers == list(range(1, len(numbers) + 1))
    assert (events[-1].finish_reason, events[-1].usage.completion_tokens) == ("length", 300)

    # Of one that is stored and was never watched there is the end alone.
    (end,) = client.stream(f"{job.id}/4")
    assert (end.text, end.is_final) == (output[4], True)
    assert asyncio.run(_answer(client, f"{job.id}/5")) == output[5]
    done = headrace(served, "stream", f"{job.id}/6")
    assert (done.status, done.out, done.err) == (0, f"{output[6]}\n", "")


def test_a_stream_that_can_not_be_is_refused(client, served, headrace, tmp_path):
    job = client.submit([{"text": "One."}], MODEL, tmp_path / "out", prompt="{text}", max_tokens=1)
    for stream_id in ("nope", "job_nope/0", f"{job.id}/1", f"{job.id}/x", job.id, "a b", "req_ 0/x"):
        done = headrace(served, "stream", stream_id)
        assert (done.status, done.out) == (2, "")
        assert done.err.startswith("headrace: ")
        assert len(done.err.splitlines()) == 1
    job.wait(timeout=120, start_worker=False)
