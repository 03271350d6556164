"""A job, three workers, an API server and all they stand on, and what can be done to them from outside."""

import os
import resource
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import psutil
from redis import Redis
from redis.exceptions import RedisError

from headrace.jobs.celery_app import create_app, live_queue, send_request, send_shards
from headrace.jobs.client import Client, Job
from headrace.jobs.embedded.valkey import redis_urls
from headrace.jobs.processes import is_alive
from headrace.jobs.settings import Settings

from ..jobs.conftest import wait_until
from ..jobs.models import WORDS, write_model_folder
from ..jobs.running import ROOT, environment, processes_of
from .api_process import ApiProcess
from .databases import LedgerDatabase
from .disk import Disk, small_disk
from .readers import LIVE_TOKEN

LEASE_SECONDS = 1.0
MAX_TOKENS = 12
NUM_WORKERS = 3
_PROMPT_TOKENS = 4


@dataclass(frozen=True)
class Scale:
    """How long a job is and how fast its workers are."""

    num_rows: int
    shard_rows: int
    num_seqs: int
    step_seconds: float

    def settings(self, database_url: str) -> dict[str, str]:
        return {
            "HEADRACE_SHARD_ROWS": str(self.shard_rows),
            "HEADRACE_LEASE_SECONDS": str(LEASE_SECONDS),
            "HEADRACE_FLUSH_SECONDS": "0.1",
            "HEADRACE_WORKER_CONCURRENCY": "2",
            "HEADRACE_DATABASE_URL": database_url,
            "HEADRACE_TEST_STEP_SECONDS": str(self.step_seconds),
            "HEADRACE_TEST_NUM_SEQS": str(self.num_seqs),
        }


def prompt_of(row: int) -> list[int]:
    """Unlike any other row's, and neither one that kills workers nor a live request's."""
    return [1 + row % 8, *(1 + int(digit) for digit in f"{row // 8:03d}")]


class Site:
    """Everything of one run, in folders of its own. Mischief is done to it by its methods, a `Random` choosing."""

    def __init__(self, stack: ExitStack, folder: Path, scale: Scale, random: Random, database: LedgerDatabase) -> None:
        self.scale = scale
        self.data_dir = folder / "data"
        self.num_begun: Counter[int] = Counter()
        self.num_kills = 0
        self._database, self._random = database, random
        self._pids, self._log = folder / "pids", folder / "log"
        self.disk: Disk = stack.enter_context(small_disk(self.data_dir / "outputs"))
        env = environment(self.data_dir, **scale.settings(database.url))
        self._settings = Settings.from_environment(env)
        self.model = write_model_folder(folder / "model")
        self.client = stack.enter_context(Client(self._settings))
        stack.enter_context(self._workers(env))
        self.api = stack.enter_context(ApiProcess(self.model, env, folder / "api log"))
        self.job: Job = self._submitted()

    def _submitted(self) -> Job:
        """A job that was submitted over HTTP by a client whose server was killed meanwhile."""
        rows = [{"text": " ".join(WORDS[token] for token in prompt_of(row))} for row in range(self.scale.num_rows)]
        body = {"model": "model", "rows": rows, "prompt": "{text}", "sampling": {"max_tokens": MAX_TOKENS}}
        key = {"Idempotency-Key": secrets.token_hex(8)}
        first = threading.Thread(target=self._try_to_submit, args=(key, body))
        first.start()
        time.sleep(self._random.uniform(0.0, 1.0))
        self.kill_api()
        first.join()
        answer = self.api.post("/jobs", key, **body)
        return self.client.job(answer["id"])

    def _try_to_submit(self, key: dict[str, str], body: dict[str, Any]) -> None:
        try:
            self.api.post("/jobs", key, **body)
        except httpx2.HTTPError:
            return

    @property
    def output(self) -> Path:
        return Path(self.job.record.output_dir)

    @contextmanager
    def _workers(self, env: dict[str, str]) -> Iterator[None]:
        begun, written = os.pipe()
        command = [sys.executable, "-m", "tests.jobs.forked_worker", str(self.model), str(self._pids), str(NUM_WORKERS)]
        with self._log.open("wb") as err:
            crew = subprocess.Popen(command, cwd=ROOT, env=env, stdout=written, stderr=err)
        os.close(written)
        reader = threading.Thread(target=self._count_begun, args=(begun,))
        reader.start()
        try:
            yield
        finally:
            crew.terminate()
            status = crew.wait(30)
            reader.join()
        assert status == 0, f"{status}: {self._log.read_text()}"

    def _count_begun(self, pipe: int) -> None:
        row_of = {tuple(prompt_of(row)): row for row in range(self.scale.num_rows)}
        with os.fdopen(pipe) as lines:
            for line in lines:
                # A row that goes on where it was streamed to brings those tokens too.
                prompt = tuple(map(int, line.split()))[:_PROMPT_TOKENS]
                if prompt[0] != LIVE_TOKEN:
                    self.num_begun[row_of[prompt]] += 1

    def worker(self) -> psutil.Process:
        """One of the workers that are there now."""
        wait_until(lambda: bool(self._alive()), "a worker has started", 60)
        return psutil.Process(self._random.choice(self._alive()))

    def _alive(self) -> list[int]:
        pids = [int(pid) for pid in self._pids.read_text().split()] if self._pids.exists() else []
        return [pid for pid in pids if is_alive(pid)]

    def kill_worker(self) -> None:
        """The sweepers, which are threads of the workers, die with them."""
        self.worker().kill()
        self.num_kills += 1

    def stop_worker_past_its_lease(self) -> None:
        worker = self.worker()
        worker.send_signal(signal.SIGSTOP)
        try:
            time.sleep(1.6 * LEASE_SECONDS)
        finally:
            worker.send_signal(signal.SIGCONT)

    def kill_api(self) -> None:
        self.api.kill()
        self.num_kills += 1
        self.api.start()

    def kill_valkey(self) -> None:
        self._kill("valkey-server")

    def kill_supervisor(self) -> None:
        self._kill("embedded.supervisor")

    def _kill(self, word: str) -> None:
        self.num_kills += 1
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

    def restart_redis_empty(self) -> None:
        self.wipe_redis()
        self.kill_valkey()

    def ring_twice(self) -> None:
        """Send every shard's message again, done, running or not, and some that mean nothing."""
        known = [shard.id for shard in self.client.ledger.shards(self.job.id)]
        with redis_urls(self._settings) as urls:
            app = create_app(urls.broker)
            send_shards(app, self.job.record.queue, [*known, "job_none/00000", "nonsense"])
            for request_id in ("req_" + 24 * "0", "nonsense"):
                send_request(app, live_queue(str(self.model), "auto"), request_id)
            app.close()

    def take_database_away(self) -> None:
        """Nobody can write, for longer than a lease."""
        with self._database.away():
            time.sleep(2 * LEASE_SECONDS)

    def fill_disk(self) -> None:
        with self.disk.full():
            time.sleep(1.0)

    def limit_files(self) -> None:
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
            self.kill_worker,
            self.stop_worker_past_its_lease,
            self.kill_valkey,
            self.kill_supervisor,
            self.wipe_redis,
            self.restart_redis_empty,
            self.ring_twice,
            self.take_database_away,
            self.limit_files,
            self.kill_api,
            *([] if self.disk.reason else [self.fill_disk]),
        ]
        self._random.shuffle(events)
        return events
