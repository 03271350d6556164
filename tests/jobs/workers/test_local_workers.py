"""A run's own worker processes: started when nobody serves the queue, given up when they keep dying."""

import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from headrace.jobs.embedded.valkey import EmbeddedValkey
from headrace.jobs.errors import WorkerFailedError
from headrace.jobs.workers import presence as presence_module
from headrace.jobs.workers.local_workers import LocalWorkers, logs_of_workers
from headrace.jobs.workers.presence import WorkerId, WorkerPresence

QUEUE = "headrace.bulk.0123456789ab"


@pytest.fixture
def presence(tmp_path) -> Iterator[WorkerPresence]:
    with EmbeddedValkey(tmp_path) as valkey, WorkerPresence(valkey.url) as presence:
        yield presence


@pytest.fixture
def worker(presence, tmp_path) -> Iterator[LocalWorkers]:
    with LocalWorkers(presence, QUEUE, ["--model", "nowhere"], tmp_path / "logs" / "worker.log") as worker:
        yield worker


@pytest.fixture
def program(monkeypatch, tmp_path) -> Callable[[str], None]:
    """Puts a shell script in the worker's place."""

    def replace(script: str) -> None:
        path = tmp_path / "worker.sh"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return replace


STAY = "exec sleep 600"


def test_the_worker_has_the_settings_it_is_given(presence, program, tmp_path, wait_until):
    program(f'echo "$HEADRACE_DATA_DIR" > {tmp_path}/said; {STAY}')
    log = tmp_path / "worker.log"
    with LocalWorkers(
        presence, QUEUE, [], log, [{"HEADRACE_DATA_DIR": "/elsewhere", "PATH": os.environ["PATH"]}]
    ) as worker:
        worker.tick(0)
        wait_until(
            lambda: (tmp_path / "said").exists() and (tmp_path / "said").read_text() == "/elsewhere\n", "it said"
        )


def tick_until_it_fails(worker: LocalWorkers, wait_until: Callable[..., None], rows: Iterator[int]) -> str:
    failures: list[str] = []

    def failed() -> bool:
        try:
            worker.tick(next(rows))
        except WorkerFailedError as error:
            failures.append(str(error))
        return bool(failures)

    wait_until(failed, "the worker is given up")
    return failures[0]


def test_a_queue_that_is_served_needs_no_worker(worker, presence, program):
    program(STAY)
    presence.announce(QUEUE, WorkerId.own())
    worker.tick(0)
    assert not worker.pids


def test_one_that_is_silent_but_alive_here_is_waited_for(worker, presence, program, wait_until, monkeypatch):
    """A second one would hold the model once more."""
    program(STAY)
    with monkeypatch.context() as short:
        short.setattr(presence_module, "TTL_SECONDS", 0.001)
        presence.announce(QUEUE, WorkerId.own())
        presence.announce(QUEUE, WorkerId("another-host", 7, "x"))
    wait_until(lambda: not presence.is_served(QUEUE), "both are silent")
    worker.tick(0)
    assert not worker.pids
    monkeypatch.setattr(presence_module, "SILENCE_SECONDS", 0.0)
    worker.tick(0)
    assert worker.pids


def test_one_that_is_silent_elsewhere_takes_no_room_here(worker, presence, program, wait_until, monkeypatch):
    program(STAY)
    with monkeypatch.context() as short:
        short.setattr(presence_module, "TTL_SECONDS", 0.001)
        presence.announce(QUEUE, WorkerId("another-host", 7, "x"))
    wait_until(lambda: not presence.is_served(QUEUE), "it is silent")
    worker.tick(0)
    assert worker.pids


def test_a_worker_is_started_once_and_ended_with_the_run(worker, program, wait_until_ended):
    program(STAY)
    worker.tick(0)
    process = psutil.Process(*worker.pids)
    worker.tick(0)
    assert worker.pids == [process.pid]
    worker.__exit__(None, None, None)
    wait_until_ended(process)


def test_a_worker_that_dies_is_started_again(worker, program, wait_until):
    program(STAY)
    worker.tick(0)
    (first,) = worker.pids
    psutil.Process(first).kill()

    def is_another() -> bool:
        worker.tick(0)
        return worker.pids not in ([], [first])

    wait_until(is_another, "another worker is started")


def test_a_worker_that_keeps_dying_is_given_up_with_its_last_words(worker, program, wait_until, tmp_path):
    program(f"echo x >> {tmp_path}/starts; echo first; echo 'out of memory' >&2; exit 3")
    failure = tick_until_it_fails(worker, wait_until, iter(lambda: 0, None))
    assert "died 6 times without finishing a row (exit status 3;" in failure
    assert failure.endswith(": out of memory")
    assert len((tmp_path / "starts").read_text().split()) == 6


def test_a_worker_that_dies_but_gets_on_is_not_given_up(worker, program, wait_until, tmp_path):
    program(f"echo x >> {tmp_path}/starts; exit 3")
    rows = iter(range(10**9))

    def started_ten_times() -> bool:
        worker.tick(next(rows))
        path = tmp_path / "starts"
        return path.exists() and len(path.read_text().split()) >= 10

    wait_until(started_ten_times, "ten starts")


def test_a_worker_that_refuses_is_not_started_twice(worker, program, wait_until, tmp_path):
    program(f"echo x >> {tmp_path}/starts; echo 'headrace: no such model' >&2; exit 2")
    failure = tick_until_it_fails(worker, wait_until, iter(lambda: 0, None))
    assert failure == "the worker refused to start: no such model"
    assert len((tmp_path / "starts").read_text().split()) == 1


def test_a_worker_is_told_its_model_queue_and_parent(worker, program, wait_until, tmp_path):
    program(f'echo "$@" > {tmp_path}/told; {STAY}')
    worker.tick(0)
    told = tmp_path / "told"
    wait_until(lambda: told.exists() and told.read_text().endswith("\n"), "the worker was told")
    assert told.read_text().split() == [
        *("-P", "-m", "headrace.jobs.cli", "worker", "--model", "nowhere"),
        *("--parent-pid", str(os.getpid())),
    ]


def test_the_log_is_where_it_was_asked_for(worker, program, wait_until, tmp_path):
    program(f"echo hello; {STAY}")
    worker.tick(0)
    log = Path(tmp_path / "logs" / "worker.log")
    wait_until(lambda: log.read_text() == "hello\n", "the log says hello")


@pytest.fixture
def two(presence, tmp_path) -> Iterator[LocalWorkers]:
    environments = [{"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": gpus} for gpus in ("4,5", "6,7")]
    with LocalWorkers(presence, QUEUE, ["--model", "x"], tmp_path / "worker.log", environments) as workers:
        yield workers


def announced(pid: int) -> WorkerId:
    return WorkerId(socket.gethostname(), pid, "x")


def test_each_of_two_has_its_place_and_its_log_again_when_it_dies(two, presence, program, wait_until, tmp_path):
    program(f"echo $CUDA_VISIBLE_DEVICES; {STAY}")
    logs = [tmp_path / "worker.log", tmp_path / "worker-2.log"]

    def have_said(*texts: str) -> bool:
        two.tick(0)
        return all(log.exists() and log.read_text() == text for log, text in zip(logs, texts, strict=True))

    wait_until(lambda: have_said("4,5\n", "6,7\n"), "both run")
    assert sorted(logs_of_workers(logs[0])) == sorted(logs)
    first, second = two.pids
    # The one that is left serves the queue: that is no reason to go on with one.
    presence.announce(QUEUE, announced(first))
    psutil.Process(second).kill()
    wait_until(lambda: have_said("4,5\n", "6,7\n6,7\n"), "the second was started again")
    assert two.pids[0] == first
    # Somebody else's is.
    presence.announce(QUEUE, WorkerId("another-host", 7, "x"))
    psutil.Process(first).kill()
    wait_until(lambda: two.tick(0) or len(two.pids) == 1, "the first is known to be dead")
    two.tick(0)
    assert len(two.pids) == 1


def test_two_are_stopped_at_a_time(two, program, wait_until, wait_until_ended, tmp_path):
    """Each ends once both have been told to: one after the other, the first would be waited for in vain."""
    told = f"{tmp_path}/told.$CUDA_VISIBLE_DEVICES"
    both = f"[ -e {tmp_path}/told.4,5 ] && [ -e {tmp_path}/told.6,7 ]"
    program(f"trap 'touch {told}' TERM; echo ready; until {both}; do sleep 0.02; done; echo left")
    two.tick(0)
    logs = logs_of_workers(tmp_path / "worker.log")
    wait_until(lambda: [log.read_text() for log in logs] == ["ready\n"] * 2, "both run")
    processes = [psutil.Process(pid) for pid in two.pids]
    two.__exit__(None, None, None)
    wait_until_ended(*processes)
    assert [log.read_text() for log in logs] == ["ready\nleft\n"] * 2


def test_what_all_refuse_is_said_once(two, program, wait_until, caplog, tmp_path):
    wait = f"[ $CUDA_VISIBLE_DEVICES = 4,5 ] || until [ -e {tmp_path}/later ]; do sleep 0.02; done"
    program(f"{wait}; echo 'headrace: no such model'; exit 2")
    wait_until(lambda: two.tick(0) or len(two.pids) == 1, "the first has refused")
    (tmp_path / "later").touch()
    assert tick_until_it_fails(two, wait_until, iter(lambda: 0, None)) == "the workers refused to start: no such model"
    assert not caplog.records


def test_the_others_go_on_without_one_that_refuses(two, presence, program, wait_until, caplog, tmp_path):
    program(f"[ $CUDA_VISIBLE_DEVICES = 4,5 ] && {STAY}; echo x >> {tmp_path}/starts; echo 'no memory'; exit 2")
    wait_until(lambda: two.tick(0) or len(two.pids) == 1, "one has refused")
    presence.announce(QUEUE, announced(*two.pids))
    for _ in range(3):
        two.tick(0)
    assert len(two.pids) == 1
    assert (tmp_path / "starts").read_text() == "x\n"
    assert [record.getMessage() for record in caplog.records] == ["worker 2 of 2 refused to start: no memory"]


def test_one_that_never_comes_to_serve_is_given_up_though_another_gets_on(
    two, presence, program, wait_until, caplog, tmp_path
):
    program(f"[ $CUDA_VISIBLE_DEVICES = 6,7 ] && {STAY}; echo x >> {tmp_path}/starts; echo 'lost its GPU'; exit 1")
    two.tick(0)
    presence.announce(QUEUE, announced(two.pids[-1]))
    rows = iter(range(10**9))
    wait_until(lambda: two.tick(next(rows)) or bool(caplog.records), "it is given up")
    assert len((tmp_path / "starts").read_text().split()) == 6
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("worker 1 of 2 died 6 times without finishing a row (exit status 1;")
    two.tick(next(rows))
    assert len(two.pids) == 1
