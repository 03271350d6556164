"""A job, two workers and all they stand on, and what can be done to them from outside."""

import os
import resource
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import psutil
from redis import Redis
from redis.exceptions import RedisError

from headrace.jobs.celery_app import create_app, send_shards
from headrace.jobs.client import Client, Job
from headrace.jobs.embedded.valkey import redis_urls
from headrace.jobs.processes import is_alive
from headrace.jobs.settings import Settings

from ..jobs.conftest import wait_until
from ..jobs.models import WORDS, write_model_folder
from ..jobs.running import ROOT, environment, processes_of

LEASE_SECONDS = 1.0
SHARD_ROWS = 16
MAX_TOKENS = 12
_SETTINGS = {
    "HEADRACE_SHARD_ROWS": str(SHARD_ROWS),
    "HEADRACE_LEASE_SECONDS": str(LEASE_SECONDS),
    "HEADRACE_FLUSH_SECONDS": "0.1",
    "HEADRACE_WORKER_CONCURRENCY": "2",
}


def prompt_of(row: int) -> list[int]:
    """Unlike any other row's, and not one that kills workers."""
    return [1 + row % 8, *(1 + int(digit) for digit in f"{row // 8:03d}")]


def _last_pid(path: Path) -> int:
    return int(path.read_text().split()[-1])


class Site:
    """Everything of one run, in folders of its own. Mischief is done to it by its methods, a `Random` choosing."""

    def __init__(self, stack: ExitStack, folder: Path, num_rows: int, random: Random, step_seconds: float) -> None:
        self.num_rows = num_rows
        self.output = folder / "out"
        self.data_dir = folder / "data"
        self.num_begun: Counter[int] = Counter()
        self._random = random
        self._pids = [folder / f"pids {number}" for number in range(2)]
        env = environment(self.data_dir, **_SETTINGS, HEADRACE_TEST_STEP_SECONDS=str(step_seconds))
        self._settings = Settings.from_environment(env)
        model = write_model_folder(folder / "model")
        self.client = stack.enter_context(Client(self._settings))
        stack.enter_context(self._workers(model, env, folder / "log"))
        rows = [{"text": " ".join(WORDS[token] for token in prompt_of(row))} for row in range(num_rows)]
        self.job: Job = self.client.submit(rows, model, self.output, prompt="{text}", max_tokens=MAX_TOKENS)

    @contextmanager
    def _workers(self, model: Path, env: dict[str, str], log: Path) -> Iterator[None]:
        begun, written = os.pipe()
        command = [sys.executable, "-m", "tests.jobs.forked_worker", str(model)]
        with log.open("wb") as err:
            processes = [
                subprocess.Popen([*command, str(pids)], cwd=ROOT, env=env, stdout=written, stderr=err)
                for pids in self._pids
            ]
        os.close(written)
        reader = threading.Thread(target=self._count_begun, args=(begun,))
        reader.start()
        try:
            yield
        finally:
            for process in processes:
                process.terminate()
            statuses = [process.wait(30) for process in processes]
            reader.join()
        assert statuses == [0, 0], log.read_text()

    def _count_begun(self, pipe: int) -> None:
        row_of = {tuple(prompt_of(row)): row for row in range(self.num_rows)}
        with os.fdopen(pipe) as lines:
            for line in lines:
                self.num_begun[row_of[tuple(map(int, line.split()))]] += 1

    def worker(self) -> psutil.Process:
        """One of the workers that are there now."""
        path = self._random.choice(self._pids)
        wait_until(lambda: path.exists() and is_alive(_last_pid(path)), "the worker has started", 60)
        return psutil.Process(_last_pid(path))

    def kill_worker(self) -> None:
        self.worker().kill()

    def stop_worker_past_its_lease(self) -> None:
        worker = self.worker()
        worker.send_signal(signal.SIGSTOP)
        try:
            time.sleep(1.6 * LEASE_SECONDS)
        finally:
            worker.send_signal(signal.SIGCONT)

    def kill_valkey(self) -> None:
        self._kill("valkey-server")

    def kill_supervisor(self) -> None:
        self._kill("embedded.supervisor")

    def _kill(self, word: str) -> None:
        for process in processes_of(self.data_dir):
            try:
                if word in " ".join(process.cmdline()):
                    process.kill()
            except psutil.NoSuchProcess:
                continue

    def wipe_redis(self) -> None:
        with redis_urls(self._settings) as urls, Redis.from_url(urls.redis) as redis:
            try:
                redis.flushall()
            except RedisError:
                # It is just being started again, after another mischief: nothing to wipe.
                return

    def ring_twice(self) -> None:
        """Send every shard's message again, done, running or not."""
        with redis_urls(self._settings) as urls:
            app = create_app(urls.broker)
            send_shards(app, self.job.record.queue, [shard.id for shard in self.client.ledger.shards(self.job.id)])
            app.close()

    def lock_database(self) -> None:
        """Nobody can write, for longer than a lease."""
        connection = sqlite3.connect(self.data_dir / "headrace.db", timeout=20, isolation_level=None)
        try:
            connection.execute("BEGIN IMMEDIATE")
            time.sleep(1.2 * LEASE_SECONDS)
            connection.execute("ROLLBACK")
        finally:
            connection.close()

    def fill_disk(self) -> None:
        """No file that a worker writes can grow beyond what the smallest part needs, its ledger's included."""
        worker = self.worker()
        _, hard = resource.prlimit(worker.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (256, hard))
        time.sleep(1.0)
        if worker.is_running():
            resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (hard, hard))

    def mischief(self) -> list[Callable[[], None]]:
        """All that can happen, each at least once, in an order of the seed's."""
        events = [
            self.kill_worker,
            self.kill_worker,
            self.stop_worker_past_its_lease,
            self.kill_valkey,
            self.kill_supervisor,
            self.wipe_redis,
            self.ring_twice,
            self.lock_database,
            self.fill_disk,
        ]
        self._random.shuffle(events)
        return events
