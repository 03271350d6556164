"""How much each may ask, without a worker."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any

from fastapi.testclient import TestClient
from redis import Redis

from headrace.jobs.api import inputs
from headrace.jobs.api.admission.rate_limits import RateLimits
from headrace.jobs.api.app import create_app
from headrace.jobs.api.errors import RateLimited
from headrace.jobs.api.models import ServedModels
from headrace.jobs.api.openai.asking import Asked
from headrace.jobs.api.openai.http_answers import close
from headrace.jobs.client.client import Client
from headrace.jobs.live.requests import LiveRequest
from headrace.jobs.spec.sampling import SamplingSpec
from headrace.jobs.streams.events import StreamEnd
from headrace.jobs.streams.publisher import StreamPublisher
from headrace.storage.ledger.records import NewJob, NewShard

from ...running import MODEL
from .conftest import COST, JOB, QUEUE, Desk, assert_limited, probe

WaitUntil = Callable[..., None]
HOLD = """
import sys, time
from headrace.jobs.open_ledger import open_ledger
from headrace.jobs.api.admission.rate_limits import RateLimits
limits = RateLimits(sys.argv[1], entry_seconds=float(sys.argv[2]))
print(limits.admit("acme", None, 100, num_tokens=80, request_id="r")[0].refused_by, flush=True)
time.sleep(600)
"""


def test_requests_a_minute(desk: Desk) -> None:
    desk.ledger.tenants.set("acme", requests_per_minute=3)
    began = time.monotonic()
    answers = [desk.probe("acme") for _ in range(3)]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0"]
    assert {answer.headers["x-ratelimit-limit-requests"] for answer in answers} == {"3"}
    refused = desk.probe("acme")
    passed = time.monotonic() - began
    # The first of the three comes back after a third of a minute, the last after a whole one.
    assert 20 - passed <= assert_limited(refused, "requests") <= 20
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert 60 - passed - 0.01 <= seconds(refused.headers["x-ratelimit-reset-requests"]) <= 60
    # A job counts too; what only looks does not, and neither does another tenant.
    assert_limited(desk.submit("acme"), "requests")
    assert desk.http.get("/jobs", headers=desk.key("acme")).json()["data"] == []
    assert desk.probe("other").status_code == 200
    assert "x-ratelimit-limit-requests" not in desk.probe("other").headers
    # Another process has the same limit.
    with RateLimits(desk.client.redis_url) as limits:
        assert limits.admit("acme", 3)[0].refused_by == "requests"


def test_a_clock_that_is_set_back_keeps_nobody_out_for_longer_than_a_minute(desk: Desk) -> None:
    with RateLimits(desk.client.redis_url) as limits, Redis.from_url(desk.client.redis_url) as redis:
        # As requests of the hour that is still to come have left it.
        redis.set("headrace:limits:requests:early", int((time.time() + 3600) * 1e6), ex=3660)
        refused, _ = limits.admit("early", requests_per_minute=3)
        assert refused.refused_by == "requests"
        assert 0 < refused.retry_after <= 20


def seconds(text: str) -> float:
    """Of a time as OpenAI's headers write it."""
    minutes, _, rest = text.rpartition("m")
    return 60 * float(minutes or 0) + float(rest.removesuffix("s"))


def test_an_upload_is_a_request_too(desk: Desk) -> None:
    desk.ledger.tenants.set("uploads", requests_per_minute=1)
    upload = partial(desk.http.post, "/v1/files", headers=desk.key("uploads"), data={"purpose": "batch"})
    taken = upload(files={"file": ("a.jsonl", b"a")})
    assert (taken.status_code, taken.headers["x-ratelimit-remaining-requests"]) == (200, "0")
    assert_limited(upload(files={"file": ("b.jsonl", b"b")}), "requests")
    assert [file["id"] for file in desk.http.get("/v1/files", headers=desk.key("uploads")).json()["data"]] == [
        taken.json()["id"]
    ]


def test_tokens_count_while_the_request_is_open(desk: Desk, wait_until: WaitUntil) -> None:
    desk.ledger.tenants.set("tokens", queued_tokens=2 * COST - 1)
    opened = desk.http.post("/open", headers=desk.key("tokens"))
    assert opened.headers["x-ratelimit-limit-tokens"] == str(2 * COST - 1)
    assert opened.headers["x-ratelimit-remaining-tokens"] == str(COST - 1)
    assert assert_limited(desk.probe("tokens"), "tokens") == 1
    for _ in range(2):
        desk.app.state.open.release()
    wait_until(lambda: desk.probe("tokens").status_code == 200, "there is room again")


def test_what_goes_on_without_its_client_holds_its_tokens_until_it_ends(desk: Desk, wait_until: WaitUntil) -> None:
    desk.ledger.tenants.set("patient", queued_tokens=2 * COST - 1)
    desk.http.post("/open", headers=desk.key("patient"))
    sampling = SamplingSpec(n=2, temperature=1.0)
    request = LiveRequest.new(queue=QUEUE, model=str(MODEL), prompt_token_ids=[1], sampling=sampling)
    asked = Asked(desk.app.state.service.models.all[0], [request], Future(), cancel_on_disconnect=False)
    asked.admissions.push(desk.app.state.open)
    answers = desk.app.state.live
    desk.http.portal.call(close, answers, asked)
    with StreamPublisher(desk.client.redis_url) as publisher:
        for stream_id in request.stream_ids:
            assert_limited(desk.probe("patient"), "tokens")
            assert answers._awaited
            publisher.open(stream_id, 1)
            publisher.finish(stream_id, StreamEnd("stop"))
            assert publisher.flush(60)
        wait_until(lambda: desk.probe("patient").status_code == 200, "there is room again")
    assert not answers._awaited


def test_only_so_many_inputs_are_fetched_at_a_time(desk: Desk) -> None:
    job = {**JOB, "rows": None, "input_url": "https://headrace.invalid/rows.jsonl"}
    with ExitStack() as downloads:
        for _ in range(inputs._MAX_DOWNLOADS):
            downloads.enter_context(inputs._a_download())
        assert assert_limited(desk.http.post("/jobs", json=job), "requests") == 5
    assert desk.http.post("/jobs", json=job).status_code == 422


def test_tokens_of_bulk_rows_count_too(desk: Desk) -> None:
    spec = {"sampling": {"max_tokens": 20}}
    job = NewJob("job-1", "bulk", "m", "/out", "f", num_rows=2, spec=spec, prompt_tokens=10, tenant="bulk")
    desk.ledger.create_job(job, [NewShard(0, 2, "/spool")])
    desk.ledger.tenants.set("bulk", queued_tokens=50 + COST - 1)
    assert_limited(desk.probe("bulk"), "tokens")
    desk.ledger.tenants.set("fits", queued_tokens=50 + COST)
    assert desk.probe("fits").headers["x-ratelimit-remaining-tokens"] == "50"


def test_a_job_of_too_many_tokens_leaves_nothing(desk: Desk) -> None:
    folder = desk.client.settings.data_dir / "outputs"
    before = sorted(folder.glob("*"))
    # The answer alone may have so many.
    desk.ledger.tenants.set("less", queued_tokens=256)
    refused = desk.submit("less")
    # Not to be tried again, although there is nothing that has to end first.
    assert (refused.status_code, refused.headers.get("Retry-After")) == (429, None)
    assert "are more than your 256 in all" in refused.json()["error"]["message"]
    desk.ledger.tenants.set("least", queued_tokens=COST - 1)
    refused = desk.probe("least")
    assert (refused.status_code, refused.headers.get("Retry-After")) == (429, None)
    assert refused.json()["error"]["message"].endswith(f"are more than your {COST - 1} in all: ask for less")
    assert desk.http.get("/jobs", headers=desk.key("less")).json()["data"] == []
    assert sorted(folder.glob("*")) == before
    desk.ledger.tenants.set("enough", queued_tokens=600)
    assert desk.submit("enough").status_code == 201


def test_concurrent_jobs(desk: Desk) -> None:
    desk.ledger.tenants.set("acme", concurrent_jobs=1)
    first = desk.submit("acme", **{"Idempotency-Key": "first"})
    assert first.status_code == 201
    assert assert_limited(desk.submit("acme"), "requests") == 15
    # The same submission again is no second job.
    assert desk.submit("acme", **{"Idempotency-Key": "first"}).json()["id"] == first.json()["id"]
    desk.http.post(f"/jobs/{first.json()['id']}/cancel", headers=desk.key("acme"))
    assert desk.submit("acme").status_code == 201


def test_all_together_may_wait_only_so_many(desk: Desk, client: Client, models: ServedModels) -> None:
    few = client.settings.model_copy(update={"max_queued_jobs": 1, "max_open_requests": 1})
    client.settings, before = few, client.settings
    try:
        app = create_app(client, models)
        probe(app)
        desk = Desk(client, TestClient(app), app)
        assert desk.submit("acme").status_code == 201
        assert_limited(desk.submit("other"), "requests")
        assert desk.probe("acme").status_code == 200
        request = LiveRequest.new(queue=QUEUE, model="model", prompt_token_ids=[1], sampling=SamplingSpec())
        client.live.submit(request)
        assert_limited(desk.probe("other"), "requests")
    finally:
        client.settings = before


def test_of_a_burst_no_more_wait_than_may(client: Client, models: ServedModels) -> None:
    client.settings, before = client.settings.model_copy(update={"max_open_requests": 3}), client.settings
    try:
        app = create_app(client, models)
        with TestClient(app):
            asked: dict[str, Any] = {
                "queue": f"{QUEUE}.burst",
                "model": "model",
                "prompt_token_ids": [1],
                "sampling": SamplingSpec(),
            }
            submitted = [app.state.live.submit([LiveRequest.new(**asked)]) for _ in range(8)]
            refused = [error for each in submitted if (error := each.exception(60)) is not None]
    finally:
        client.settings = before
    assert client.live.num_unanswered(f"{QUEUE}.burst") == 3
    assert len(refused) == 5
    for error in refused:
        assert isinstance(error, RateLimited)
        assert error.headers == {"Retry-After": "1"}


def test_what_a_killed_process_held_is_free_again(client: Client, wait_until: WaitUntil) -> None:
    # Entries are renewed three times in it: one whose owner stands still for a while does not run out.
    life = 4.0
    command = [sys.executable, "-c", HOLD, client.redis_url, str(life)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
        RateLimits(client.redis_url, entry_seconds=life) as limits,
        Redis.from_url(client.redis_url) as redis,
    ):

        def runs_out() -> float:
            found: Any = redis.zscore("headrace:limits:entries:acme", "r|80")
            return float(found or 0.0) / 1e6

        try:
            assert process.stdout.readline() == "None\n"
            began = runs_out()
            assert limits.admit("acme", None, 100, num_tokens=10, request_id="own")[0].refused_by is None
            usage, _ = limits.admit("acme", None, 100, num_tokens=80, request_id="other")
            assert (usage.refused_by, usage.held_tokens) == ("tokens", 90)
            # It is renewed for as long as its owner lives.
            wait_until(lambda: runs_out() > began + life, "a whole life has passed and it has been renewed")
            wait_until(lambda: limits.held_tokens("acme") == 90, "both count")
        finally:
            process.send_signal(signal.SIGKILL)
        wait_until(lambda: limits.held_tokens("acme") == 10, "the dead one's have run out")


def test_limits_hold_when_many_come_at_once(client: Client) -> None:
    with RateLimits(client.redis_url) as limits, ThreadPoolExecutor(8) as pool:
        each = list(product(range(40), [limits]))
        admitted = list(pool.map(lambda one: one[1].admit("many", 10, 100, 0, 30, f"r{one[0]}"), each))
    # Three times thirty tokens, although ten requests were free.
    assert sum(usage.refused_by is None for usage, _ in admitted) == 3
    with RateLimits(client.redis_url) as limits:
        assert limits.held_tokens("many") == 0
        usage, _ = limits.admit("many", 10)
        # Those that were refused for their tokens did not count as requests.
        assert usage.remaining_requests == 6


def test_a_wiped_redis_forgets_and_learns_again(client: Client, wait_until: WaitUntil) -> None:
    with RateLimits(client.redis_url, entry_seconds=0.3) as limits:
        limits.admit("wiped", 5, 100, 0, 60, "r")
        limits._redis.delete(*limits._redis.keys("headrace:limits:*:wiped"))
        wait_until(lambda: limits.held_tokens("wiped") == 60, "what is open counts again")
    # All that is left goes by itself.
    with RateLimits(client.redis_url) as limits:
        assert all(limits._redis.pttl(key) != -1 for key in limits._redis.keys("headrace:limits:*"))
