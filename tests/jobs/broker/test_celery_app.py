"""Shards over a real Valkey to a real worker, with both being killed."""

import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
from celery import Celery
from kombu.exceptions import OperationalError
from redis import Redis

from headrace.jobs.broker.celery_app import (
    RESCUE_PRIORITY,
    RUN_SHARD,
    create_app,
    live_queue,
    ring_for_requests,
    send_shards,
    shard_queue,
)
from headrace.jobs.embedded.valkey import EmbeddedValkey
from headrace.jobs.spec.precision import Precision

from ..conftest import has_ended, wait_until
from .half_replies import half_replies

SCRIPT = Path(__file__).parents[1] / "shard_worker.py"
QUEUE = shard_queue("models/tickets", Precision("float32"))
LIVE_QUEUE = live_queue("models/tickets", Precision("float32"))


class Broker:
    """An embedded Valkey that can be taken away for a while."""

    def __init__(self, valkey: EmbeddedValkey, data_dir: Path) -> None:
        self.valkey = valkey
        self.app = create_app(valkey.url)
        self._data_dir = data_dir
        self._suspended: list[psutil.Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for supervisor in self._suspended:
            with suppress(psutil.NoSuchProcess):
                supervisor.resume()

    def send(self, *shard_ids: str, **options: Any) -> None:
        send_shards(self.app, QUEUE, shard_ids, **options)

    def num_waiting(self) -> int:
        with Redis.from_url(self.valkey.url) as redis:
            return sum(redis.llen(key) for key in redis.keys(f"{QUEUE}*"))

    def take_away(self) -> Callable[..., None]:
        """Kill the server; the function returned brings it back, empty if asked."""
        with Redis.from_url(self.valkey.url) as redis:
            server = psutil.Process(redis.info("server")["process_id"])
            # While the disk is slow with what was written before, it keeps what has come since for itself.
            wait_until(lambda: redis.info("persistence")["aof_buffer_length"] == 0, "the server has written it all")
        supervisor = server.parent()
        self._suspended.append(supervisor)
        supervisor.suspend()
        server.kill()
        wait_until(lambda: has_ended(server), "the server is gone")

        def bring_back(empty: bool = False) -> None:
            if empty:
                shutil.rmtree(self._data_dir / "valkey/appendonlydir")
            supervisor.resume()
            self.valkey.ensure()

        return bring_back


class RunningWorker:
    """A worker process and what it has written down."""

    def __init__(self, folder: Path, concurrency: int, *live_queues: str) -> None:
        self._events = folder / "events"
        self._events.touch()
        self._go = folder / "go"
        self._log = folder / "worker.log"
        command: list[str | Path] = [sys.executable, SCRIPT, folder, QUEUE, str(concurrency), self._events, self._go]
        command += live_queues
        with open(self._log, "w") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)

    def events(self, kind: str) -> list[str]:
        words = (line.split(" ", 1) for line in self._events.read_text().splitlines())
        return [rest[0] if rest else "" for verb, *rest in words if verb == kind]

    def log(self) -> str:
        return self._log.read_text()

    def has_ended(self) -> bool:
        return self.process.poll() is not None

    def let_shards_end(self) -> None:
        self._go.touch()


@pytest.fixture
def broker(tmp_path) -> Iterator[Broker]:
    with EmbeddedValkey(tmp_path) as valkey, Broker(valkey, tmp_path) as broker:
        yield broker


@pytest.fixture
def start_worker(tmp_path) -> Iterator[Callable[..., RunningWorker]]:
    workers: list[RunningWorker] = []

    def start(concurrency: int, *live_queues: str) -> RunningWorker:
        workers.append(RunningWorker(tmp_path, concurrency, *live_queues))
        return workers[-1]

    yield start
    for worker in workers:
        worker.process.kill()
        worker.process.communicate()


def ids(prefix: str, count: int) -> list[str]:
    return [f"{prefix}/{number:05d}" for number in range(count)]


def test_the_queues_name_is_stable():
    assert QUEUE == "headrace.bulk.464e3d393146"
    assert shard_queue("models/tickets", Precision("bfloat16")) != QUEUE
    assert shard_queue("models/tickets", Precision("float32", "int8")) != QUEUE


def test_what_is_sent_lies_in_the_queue_and_nowhere_else(broker):
    broker.send(*ids("job", 1203))
    assert broker.num_waiting() == 1203
    with Redis.from_url(broker.valkey.url) as redis:
        assert all(key.startswith(QUEUE.encode()) for key in redis.scan_iter())


def test_sending_nothing_is_fine(broker):
    broker.send()
    assert broker.num_waiting() == 0


def test_sending_without_redis_fails_clearly(tmp_path):
    app = create_app(f"unix://{tmp_path}/nothing.sock")
    with pytest.raises(OperationalError, match=r"nothing\.sock"):
        send_shards(app, QUEUE, ["job/00000"])


def test_requests_that_cannot_be_rung_for_are_told_of(tmp_path, caplog):
    ring_for_requests(create_app(f"unix://{tmp_path}/nothing.sock"), LIVE_QUEUE, ["req_1", "req_2"])
    assert "2 requests wait for a sweeper" in caplog.text
    assert "nothing.sock" in caplog.text


def test_sending_fails_when_redis_has_gone_and_works_when_it_is_back(broker):
    broker.send("job/00000")
    bring_back = broker.take_away()
    with pytest.raises(OperationalError):
        broker.send("job/00001")
    bring_back()
    broker.send("job/00002")
    assert broker.num_waiting() == 2


def test_each_shard_runs_once_and_what_was_rescued_runs_first(broker, start_worker, wait_until):
    broker.send(*ids("bulk", 30))
    broker.send("rescued", priority=RESCUE_PRIORITY)
    worker = start_worker(1)
    worker.let_shards_end()
    wait_until(lambda: len(worker.events("end")) == 31, "all shards have run")
    assert worker.events("start") == ["rescued", *ids("bulk", 30)]


def test_a_free_thread_gets_the_next_shard_at_once(broker, start_worker, wait_until):
    """Celery alone lets a thread idle for up to a second when it does not prefetch."""
    broker.send(*ids("job", 200))
    worker = start_worker(1)
    worker.let_shards_end()
    wait_until(lambda: len(worker.events("end")) == 200, "two hundred shards have run", seconds=60)


def test_a_worker_takes_no_more_than_it_runs(broker, start_worker, wait_until):
    broker.send(*ids("job", 10))
    worker = start_worker(4)
    wait_until(lambda: len(worker.events("start")) == 4, "four shards run")
    assert broker.num_waiting() == 6
    worker.let_shards_end()
    wait_until(lambda: len(worker.events("end")) == 10, "all shards have run")


OUTAGES = {"short": False, "until the running shards have ended": True}


@pytest.mark.parametrize("tasks_end_meanwhile", OUTAGES.values(), ids=OUTAGES)
@pytest.mark.parametrize("num_shards", [2, 4, 12])
def test_a_worker_survives_that_redis_is_killed(num_shards, tasks_end_meanwhile, broker, start_worker, wait_until):
    """With acknowledgements in Redis a worker of Celery 5.7.0 hangs in the case of 12 shards and a long outage."""
    broker.send(*ids("before", num_shards))
    worker = start_worker(4)
    running = min(num_shards, 4)
    wait_until(lambda: len(worker.events("start")) == running, "shards run")
    bring_back = broker.take_away()
    if tasks_end_meanwhile:
        worker.let_shards_end()
        wait_until(lambda: len(worker.events("end")) == running, "the running shards have ended")
    bring_back()
    broker.send(*ids("after", 2))
    worker.let_shards_end()
    everything = ids("before", num_shards) + ids("after", 2)
    wait_until(lambda: len(worker.events("end")) >= len(everything), "all shards have run")
    assert sorted(worker.events("start")) == sorted(everything)
    assert "Traceback" not in worker.log()


def test_a_worker_survives_what_redis_answers(broker, start_worker, wait_until):
    """A failover, then too few replicas: it lets the worker connect and answers its BRPOP with an error."""
    worker = start_worker(1, LIVE_QUEUE)
    worker.let_shards_end()
    wait_until(lambda: "ready." in worker.log(), "the worker listens")
    with Redis.from_url(broker.valkey.url) as redis:
        redis.replicaof("127.0.0.1", 1)
        wait_until(lambda: "Redis answers" in worker.log() or worker.has_ended(), "the worker is told of the failover")
        redis.replicaof("NO", "ONE")
        redis.config_set("min-replicas-to-write", 1)
        wait_until(lambda: "NOREPLICAS" in worker.log() or worker.has_ended(), "the worker is refused")
        redis.config_set("min-replicas-to-write", 0)
    broker.send("job/00000")
    ring_for_requests(broker.app, LIVE_QUEUE, ["req_1"])
    wait_until(lambda: worker.events("end") == ["job/00000"] or worker.has_ended(), "the shard has run")
    wait_until(lambda: worker.events("bell") == ["req_1"] or worker.has_ended(), "the bell was heard")
    assert not worker.has_ended(), worker.log()
    assert "Connection to broker lost" not in worker.log()
    # Celery's advice about a setting, of eight lines, at each try.
    assert "DeprecationWarning" not in worker.log()


def test_half_an_answer_makes_no_worker_deaf(broker):
    """The rest of it never comes, on a connection that stays open."""
    code = """
import sys
from headrace.jobs.broker import celery_app
from headrace.jobs.workers import celery_worker
celery_app._REPLY_SECONDS = 0.5
_, address, queue = sys.argv
app = celery_app.create_app(f"redis://{address}")
@app.task(name=celery_app.RUN_SHARD)
def run_shard(shard_id):
    print(shard_id, flush=True)
celery_worker.run_worker(app, [queue], 1, on_shutdown=lambda: None)
"""
    command = [sys.executable, "-c", code]
    server = broker.valkey.url.removeprefix("unix://")
    with (
        half_replies(server, marker=QUEUE.encode()) as proxy,
        subprocess.Popen([*command, proxy.address, QUEUE], stdout=subprocess.PIPE, text=True) as worker,
        killed_in_time(worker),
    ):
        broker.send("job/00000")
        assert proxy.has_cut.wait(60)
        broker.send("job/00001")
        assert worker.stdout.readline() == "job/00001\n"


def test_a_task_that_celery_fails_over_keeps_no_thread_from_the_next(broker):
    """As where no file can be opened: Celery does so after a task, and again to say that it could not."""
    code = f"""
import resource
from headrace.jobs.broker import celery_app
from headrace.jobs.workers import celery_worker
app = celery_app.create_app({broker.valkey.url!r})
@app.task(name=celery_app.RUN_SHARD)
def run_shard(shard_id):
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, most))
    print(shard_id, flush=True)
celery_worker.run_worker(app, [{QUEUE!r}], 1, on_shutdown=lambda: None)
"""
    broker.send("job/00000", "job/00001")
    with (
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as worker,
        killed_in_time(worker),
    ):
        assert [worker.stdout.readline() for _ in range(2)] == ["job/00000\n", "job/00001\n"]


@contextmanager
def killed_in_time(process: "subprocess.Popen[str]") -> Iterator[None]:
    """At the end, or when what it should say has been waited for long enough."""
    timer = threading.Timer(180, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        process.kill()


def test_a_worker_finds_its_queue_in_a_redis_restarted_empty(broker, start_worker, wait_until):
    broker.send(*ids("before", 12))
    worker = start_worker(4)
    wait_until(lambda: len(worker.events("start")) == 4, "shards run")
    broker.take_away()(empty=True)
    broker.send(*ids("after", 2))
    worker.let_shards_end()
    expected = worker.events("start")[:4] + ids("after", 2)
    wait_until(lambda: len(worker.events("end")) >= 6, "what is left has run")
    assert sorted(worker.events("start")) == sorted(expected)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_ends_what_runs_and_leaves_the_rest(signum, broker, start_worker, wait_until):
    broker.send(*ids("job", 10))
    worker = start_worker(4)
    wait_until(lambda: len(worker.events("start")) == 4, "four shards run")
    worker.process.send_signal(signum)
    output, _ = worker.process.communicate(timeout=60)
    assert worker.process.returncode == 0
    assert len(worker.events("told")) == 1
    assert sorted(worker.events("start")) == sorted(worker.events("end"))
    assert broker.num_waiting() == 6
    assert output == ""
    assert "Traceback" not in worker.log()


def test_told_to_stop_while_messages_arrive_it_loses_none(broker, start_worker, wait_until):
    worker = start_worker(2)
    wait_until(lambda: "ready." in worker.log(), "the worker listens")
    worker.process.terminate()
    for shard_id in ids("job", 50):
        broker.send(shard_id)
    assert worker.process.wait(timeout=60) == 0
    assert len(worker.events("start")) + broker.num_waiting() == 50


def test_told_to_stop_without_redis_it_leaves(broker, start_worker, wait_until):
    broker.send(*ids("job", 2))
    worker = start_worker(4)
    wait_until(lambda: len(worker.events("start")) == 2, "two shards run")
    bring_back = broker.take_away()
    # However long Redis is away: once it is back, a worker is not to wait long.
    again = "trying again in 1.00 s"
    wait_until(lambda: worker.log().count(again) >= 2, "the worker has tried to connect three times")
    reasons = [line.partition("Cannot connect")[2] for line in worker.log().splitlines() if "Cannot connect" in line]
    assert len(reasons) == len(set(reasons)) == worker.log().count("Trying again in 1.00 second") > 0
    worker.process.terminate()
    wait_until(lambda: worker.events("left") == [""], "the worker has left")
    bring_back()
    assert worker.process.wait(timeout=60) == 0


def test_a_second_ctrl_c_ends_a_shard_that_does_not_listen(broker):
    code = f"""
import threading
from headrace.jobs.broker.celery_app import RUN_SHARD, create_app
from headrace.jobs.workers.celery_worker import run_worker
app = create_app({broker.valkey.url!r})
@app.task(name=RUN_SHARD)
def run_shard(shard_id):
    print(shard_id, flush=True)
    threading.Event().wait()
run_worker(app, [{QUEUE!r}], 1, on_shutdown=lambda: print("told", flush=True))
"""
    broker.send("job/00000")
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as deaf:
        assert deaf.stdout.readline() == "job/00000\n"
        deaf.send_signal(signal.SIGINT)
        assert deaf.stdout.readline() == "told\n"
        deaf.send_signal(signal.SIGINT)
        assert deaf.wait(timeout=60) == -signal.SIGINT


def test_importing_the_app_is_light():
    """Producers and the command line import it: neither torch nor the database belong to it, nor Celery's worker."""
    heavy = {"torch", "sqlalchemy", "pyarrow", "celery.worker"}
    code = f"import sys, headrace.jobs.broker.celery_app; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_only_json_is_accepted():
    app: Celery = create_app("redis://localhost")
    assert app.conf.accept_content == ["json"]
    assert app.conf.task_serializer == "json"
    assert RUN_SHARD == "headrace.run_shard"
