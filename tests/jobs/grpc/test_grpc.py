"""gRPC through a real channel: the same answers, limits and refusals as over HTTP."""

import asyncio
import itertools
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from fastapi import FastAPI

from headrace.jobs.api import worker_watch
from headrace.jobs.api.app import create_app
from headrace.jobs.api.models import ServedModels
from headrace.jobs.broker.celery_app import shard_queue
from headrace.jobs.client.client import Client
from headrace.jobs.grpc.headrace_pb2 import GenerateRequest, GenerateResponse, Message, ResponseFormat, StreamRequest
from headrace.jobs.grpc.headrace_pb2_grpc import HeadraceStub
from headrace.jobs.grpc.health_pb2 import HealthCheckRequest, HealthCheckResponse
from headrace.jobs.grpc.health_pb2_grpc import HealthStub
from headrace.jobs.grpc.server import grpc_server
from headrace.jobs.live.requests import LiveRequests
from headrace.jobs.settings import Settings
from headrace.jobs.spec.precision import Precision
from headrace.jobs.streams.keys import stream_key
from headrace.jobs.workers import presence as presence_module
from headrace.jobs.workers.presence import WorkerId, WorkerPresence

from ..api.live_desk import LiveDesk
from ..api_server import ApiServer
from ..running import MODEL, ROOT, Result, environment

MESSAGES: list[dict[str, Any]] = [{"role": "user", "content": "Where is my parcel?"}]
OPTIONS: dict[str, Any] = {"model": MODEL.name, "temperature": 0.0, "max_tokens": 30, "ignore_eos": True}


@pytest.fixture(scope="module")
def stub(api: ApiServer) -> Iterator[HeadraceStub]:
    with grpc.insecure_channel(api.grpc) as channel:
        yield HeadraceStub(channel)


def chat(**changes: Any) -> GenerateRequest:
    return GenerateRequest(**{**OPTIONS, "messages": [Message(**each) for each in MESSAGES], **changes})


def read(call: Any) -> tuple[list[GenerateResponse], GenerateResponse]:
    """The responses with tokens of a call with one choice, each token once and in order, and the end."""
    *tokens, end = call
    assert end.HasField("end")
    for before, now in itertools.pairwise(tokens):
        assert now.tokens.first == before.tokens.first + len(before.tokens.token_ids)
    return tokens, end


def text_of(responses: list[GenerateResponse], end: GenerateResponse) -> str:
    return "".join(response.tokens.text for response in responses) + end.end.text


def test_generated_code_is_what_the_proto_gives(tmp_path: Path) -> None:
    outputs = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "typings", *outputs]
    protos = [f"headrace/jobs/grpc/{name}.proto" for name in ("headrace", "health", "reflection")]
    subprocess.run([*command, *protos], cwd=ROOT, check=True)
    made = {path.name: path.read_text() for path in tmp_path.rglob("*_pb2*")}
    assert made == {path.name: path.read_text() for path in (ROOT / "jobs/grpc").glob("*_pb2*")}
    assert len(made) == 9


def test_probes_learn_whether_calls_are_taken(api: ApiServer) -> None:
    with grpc.insecure_channel(api.grpc) as channel:
        health = HealthStub(channel)
        for service in ("", "headrace.v1.Headrace"):
            assert health.Check(HealthCheckRequest(service=service), timeout=60).status == HealthCheckResponse.SERVING
        with pytest.raises(grpc.RpcError) as unknown:
            health.Check(HealthCheckRequest(service="other"), timeout=60)
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        watching = health.Watch(HealthCheckRequest(service="other"))
        assert next(watching).status == HealthCheckResponse.SERVICE_UNKNOWN
        watching.cancel()


def test_a_chat_is_answered_as_over_http(api: ApiServer, stub: HeadraceStub) -> None:
    call = stub.Generate(chat(logprobs=True, top_logprobs=1), timeout=90)
    tokens, end = read(call)
    answer = api.post("/v1/chat/completions", **OPTIONS, messages=MESSAGES)
    assert text_of(tokens, end) == answer["choices"][0]["message"]["content"]
    assert (end.end.finish_reason, end.end.num_tokens) == ("length", 30)
    assert end.end.usage.prompt_tokens == answer["usage"]["prompt_tokens"]
    assert end.end.usage.completion_tokens == 30
    first = tokens[0]
    assert first.tokens.first == 1
    assert len(first.tokens.logprobs) == len(first.tokens.texts) == len(first.tokens.token_ids)
    assert first.tokens.logprobs[0].top[0].token_id == first.tokens.token_ids[0]
    assert dict(call.initial_metadata())["x-request-id"] == first.id == end.id

    rest, same_end = read(stub.Stream(StreamRequest(id=end.id, after=7), timeout=90))
    assert rest[0].tokens.first == 8
    assert same_end == end
    texts = [text for response in tokens for text in response.tokens.texts]
    assert text_of(rest, end) == "".join(texts[7:]) + end.end.text


def test_several_choices_of_token_ids(api: ApiServer, stub: HeadraceStub) -> None:
    request = GenerateRequest(**OPTIONS | {"temperature": 1.0, "seed": 2**60}, prompt_token_ids=[5, 6, 7], n=2)
    responses = list(stub.Generate(request, timeout=90))
    body = OPTIONS | {"temperature": 1.0, "seed": 2**60, "n": 2}
    answer = api.post("/v1/completions", **body, prompt=[5, 6, 7])
    for choice in range(2):
        own = [response for response in responses if response.choice == choice]
        assert text_of(own[:-1], own[-1]) == answer["choices"][choice]["text"]
    second = next(response.id for response in responses if response.choice == 1)
    tokens, _ = read(stub.Stream(StreamRequest(id=second), timeout=90))
    assert {response.choice for response in tokens} == {1}


def test_an_answer_has_the_form_that_was_asked_for(stub: HeadraceStub) -> None:
    guided = chat(guided_choice=["billing", "refund"], ignore_eos=False)
    assert text_of(*read(stub.Generate(guided, timeout=90))) in ("billing", "refund")
    shape = ResponseFormat(type="json_schema", schema='{"enum": ["yes", "no"]}')
    formed = text_of(*read(stub.Generate(chat(response_format=shape, ignore_eos=False), timeout=90)))
    assert formed.strip() in ('"yes"', '"no"')


def test_what_may_be_said_and_what_is_written_out_of_it(api: ApiServer, stub: HeadraceStub) -> None:
    free, end = read(stub.Generate(chat(), timeout=90))
    text, first = text_of(free, end), free[0].tokens
    word, token = first.texts[0], first.token_ids[0]
    assert text_of(*read(stub.Generate(chat(allowed_token_ids=[token]), timeout=90))) == word * 30
    assert not text_of(*read(stub.Generate(chat(bad_words=[word]), timeout=90))).startswith(word)
    asked: dict[str, Any] = {"stop": [text[4:7]], "include_stop_str_in_output": True, "skip_special_tokens": False}
    tokens, end = read(stub.Generate(chat(**asked), timeout=90))
    stopped = text_of(tokens, end)
    assert stopped == text.partition(text[4:7])[0] + text[4:7]
    assert (end.end.WhichOneof("stop_reason"), end.end.stop_text) == ("stop_text", text[4:7])
    assert read(stub.Stream(StreamRequest(id=end.id), timeout=90))[1] == end
    _, end = read(stub.Generate(chat(stop_token_ids=[token]), timeout=90))
    assert (end.end.WhichOneof("stop_reason"), end.end.stop_token_id) == ("stop_token_id", token)
    _, end = read(stub.Generate(chat(), timeout=90))
    assert end.end.WhichOneof("stop_reason") is None
    answer = api.post("/v1/chat/completions", **OPTIONS, **asked, messages=MESSAGES)
    assert answer["choices"][0]["message"]["content"] == stopped


def test_a_row_of_a_job(api: ApiServer, stub: HeadraceStub, wait_until_done: Callable[[str], Any]) -> None:
    job = api.post("/jobs", model=api.model, rows=[{"text": "late"}], prompt="{text}", sampling={"max_tokens": 5})
    _, end = read(stub.Stream(StreamRequest(id=f"{job['id']}/0"), timeout=90))
    assert end.end.finish_reason in ("stop", "length")
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Stream(StreamRequest(id=f"{job['id']}/1"), timeout=90))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    wait_until_done(job["id"])


SCHEMA = ResponseFormat(type="json_schema", schema="{")


@pytest.mark.parametrize(
    ("request_", "code", "param"),
    [
        (chat(temperature=-1.0), "INVALID_ARGUMENT", "temperature"),
        (chat(top_logprobs=3), "INVALID_ARGUMENT", "top_logprobs"),
        (chat(response_format=SCHEMA), "INVALID_ARGUMENT", "response_format.schema"),
        (chat(bad_words=[" "]), "INVALID_ARGUMENT", "bad_words"),
        (chat(allowed_token_ids=[10**6]), "INVALID_ARGUMENT", "allowed_token_ids"),
        (chat(prompt="both"), "INVALID_ARGUMENT", "messages"),
        (chat(messages=[]), "INVALID_ARGUMENT", "messages"),
        (chat(messages=[Message(role="judge", content="x")]), "INVALID_ARGUMENT", "messages[0].role"),
        (GenerateRequest(model=MODEL.name, prompt_token_ids=[10**6]), "INVALID_ARGUMENT", "prompt"),
        (chat(model="another"), "NOT_FOUND", "model"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_named(stub: HeadraceStub, request_: GenerateRequest, code: str, param: str) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.Generate(request_, timeout=90))
    assert refused.value.code().name == code
    assert dict(refused.value.trailing_metadata())["error-param"] == param
    assert refused.value.details()


def test_a_stream_that_is_not_there(stub: HeadraceStub) -> None:
    for unknown in ("", "req_x", f"req_{'0' * 24}", "job_x/1", "job_x/-1", "/", f"job_x/{'9' * 30}"):
        with pytest.raises(grpc.RpcError) as refused:
            list(stub.Stream(StreamRequest(id=unknown), timeout=90))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND, unknown


def test_an_answer_that_redis_has_lost_is_not_waited_for(
    stub: HeadraceStub, desk: LiveDesk, wait_until: Callable[..., None]
) -> None:
    _, end = read(stub.Generate(chat(max_tokens=2), timeout=90))
    wait_until(lambda: desk.has_ended(end.id), "the request has ended")
    desk.forget(stream_key(end.id))
    with pytest.raises(grpc.RpcError) as lost:
        list(stub.Stream(StreamRequest(id=end.id), timeout=90))
    assert lost.value.code() is grpc.StatusCode.INTERNAL
    assert dict(lost.value.trailing_metadata())["error-code"] == "stream_lost"


def test_a_call_that_is_cancelled_ends_its_answer(stub: HeadraceStub, desk: LiveDesk) -> None:
    def leave() -> str:
        # More tokens than can be there before its end is noticed.
        call = stub.Generate(chat(max_tokens=1900))
        next(call)
        call.cancel()
        return str(dict(call.initial_metadata())["x-request-id"])

    desk.cut_short(leave)


@asynccontextmanager
async def served_alone(client: Client) -> AsyncIterator[tuple[FastAPI, HeadraceStub]]:
    """A server in this event loop, over a data folder in which no worker takes anything."""
    listening: asyncio.Queue[None] = asyncio.Queue()
    address = f"unix:{client.settings.data_dir}/grpc"
    beside = partial(
        grpc_server,
        address=address,
        max_request_bytes=2**20,
        grace_seconds=5.0,
        on_listening=lambda: listening.put_nowait(None),
    )
    app = create_app(client, ServedModels.of([str(MODEL)]), beside)
    async with app.router.lifespan_context(app), grpc.aio.insecure_channel(address) as channel:
        listening.get_nowait()
        yield app, HeadraceStub(channel)


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in call:
            pass
    return refused.value


@pytest.mark.usefixtures("lasting_presence")
def test_keys_limits_and_workers_count_as_over_http(tmp_path: Path) -> None:
    with Client(Settings.from_environment(environment(tmp_path))) as client:
        key = client.ledger.api_keys.create("acme", None).secret
        client.ledger.tenants.set("acme", requests_per_minute=2)
        asyncio.run(_use_up(client, f"Bearer {key}"))


async def _use_up(client: Client, authorization: str) -> None:
    metadata = (("authorization", authorization),)
    async with served_alone(client) as (app, stub):
        for given in ((), (("authorization", "Bearer hr_wrong"),), metadata + metadata):
            nobody = await refusal(stub.Generate(chat(), metadata=given))
            assert nobody.code() is grpc.StatusCode.UNAUTHENTICATED
        unserved = await refusal(stub.Generate(chat(), metadata=metadata))
        assert unserved.code() is grpc.StatusCode.UNAVAILABLE
        assert dict(unserved.trailing_metadata())["retry-after"] == "5"
        with WorkerPresence(client.redis_url) as presence, LiveRequests(client.redis_url, client.celery) as requests:
            presence.announce(shard_queue(str(MODEL), Precision()), WorkerId.own())
            calls = [stub.Generate(chat(), metadata=metadata) for _ in range(2)]
            headers = [dict(await call.initial_metadata()) for call in calls]
            assert sorted(header["x-ratelimit-remaining-requests"] for header in headers) == ["0", "1"]
            refused = await refusal(stub.Generate(chat(), metadata=metadata))
            assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert int(dict(refused.trailing_metadata())["retry-after"]) > 0
            ids = [header["x-request-id"] for header in headers]
            assert all(requests.get(each).request.tenant == "acme" for each in ids)
            calls[0].cancel()
            async with asyncio.timeout(60):
                while not requests.get(ids[0]).is_cancelled:
                    await asyncio.sleep(0.01)
            assert not requests.get(ids[1]).is_cancelled
            # What the server does when it stops.
            app.state.stopping.set()
            stopped = await refusal(calls[1])
            assert stopped.code() is grpc.StatusCode.UNAVAILABLE
            assert dict(stopped.trailing_metadata())["error-code"] == "server_stops"


def test_without_the_extra_there_is_one_line(
    headrace: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.startswith("headrace.jobs.grpc")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "grpc", None)
    result = headrace(tmp_path, "serve", "--model", MODEL, "--port", "0", "--grpc-port", "0")
    assert result.status == 2
    assert result.err == "headrace: --grpc-port: grpc is missing: install headrace with its grpc extra\n"


def test_whoever_leaves_waits_no_more_for_a_silent_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_watch, "RETURN_SECONDS", 1e9)
    with Client(Settings.from_environment(environment(tmp_path))) as client:
        with WorkerPresence(client.redis_url) as presence, monkeypatch.context() as short:
            short.setattr(presence_module, "TTL_SECONDS", 0.001)
            presence.announce(shard_queue(str(MODEL), Precision()), WorkerId("another-host", 7, "x"))
        asyncio.run(_leave(client))


async def _leave(client: Client) -> None:
    async with served_alone(client) as (_, stub), asyncio.timeout(60):
        call = stub.Generate(chat())
        asked = asyncio.ensure_future(call.initial_metadata())
        while not _are_waiting():
            assert not asked.done()
            await asyncio.sleep(0.01)
        call.cancel()
        while _are_waiting() or not asked.done():
            await asyncio.sleep(0.01)
        assert call.cancelled()


def _are_waiting() -> bool:
    """Whether a request waits for a worker, or to be handed over to one."""
    waiting = worker_watch.WorkerWatch.wait_for.__qualname__
    return any(getattr(task.get_coro(), "__qualname__", "") == waiting for task in asyncio.all_tasks())
