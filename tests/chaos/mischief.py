"""What can be done to a site from outside."""

import os
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
from redis import Redis
from redis.exceptions import RedisError

from headrace.jobs.broker.celery_app import create_app, live_queue, ring_for_requests, send_shards
from headrace.jobs.broker.redis_access import redis_server
from headrace.jobs.processes import is_alive
from headrace.jobs.spec.precision import Precision
from headrace.jobs.streams.keys import tokens_key
from headrace.jobs.workers.presence import WorkerId
from headrace.storage.ledger.records import ShardRecord, ShardState

from ..jobs.conftest import wait_until
from ..jobs.running import processes_of
from .long_jobs import LongJob
from .site import LEASE_SECONDS, Site, stopped

_TRIES = 3
_LONGER_THAN_A_LEASE = 1.6 * LEASE_SECONDS
_MOST_SECONDS = 240.0


@dataclass
class Mischief:
    """`done`: how often each kind of it was, `num_kills`: how many processes were killed with -9."""

    site: Site
    done: Counter[str] = field(default_factory=Counter)
    num_kills: int = 0

    def kinds(self) -> list[Callable[[], None]]:
        """All that can happen, in an order of the seed's; only the first one takes a Redis that is there."""
        of_long = [self.kill_all_workers, self.stop_redis, self.stop_worker]
        frozen = [self.freeze_until_taken, self.freeze_until_done]
        return [self.kill_writer, *self._shuffled(*of_long, *frozen, *self._of_redis(), *self._of_others())]

    def half_of_kinds(self, seed: int) -> list[Callable[[], None]]:
        """Nearly all, of which two neighbouring seeds have a half each; first what takes rows in flight."""
        if seed % 2 == 0:
            return [self.freeze_until_done, *self._shuffled(self.stop_worker, *self._of_redis())]
        return [self.kill_writer, *self._shuffled(self.freeze_until_taken, *self._of_others())]

    def _of_redis(self) -> list[Callable[[], None]]:
        return [
            self.kill_worker,
            self.kill_worker,
            self.kill_redis,
            self.wipe_redis,
            self.restart_redis_empty,
            *([] if self.site.disk.reason else [self.fill_disk]),
        ]

    def _of_others(self) -> list[Callable[[], None]]:
        return [
            self.kill_worker,
            self.kill_supervisor,
            self.ring_twice,
            self.take_database_away,
            self.limit_files,
            self.kill_api,
        ]

    def _shuffled(self, *events: Callable[[], None]) -> list[Callable[[], None]]:
        return self.site.random.sample(events, len(events))

    def do(self, event: Callable[[], None]) -> None:
        self.done[event.__name__.replace("_", " ")] += 1
        event()

    def __str__(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in sorted(self.done.items()))

    def kill_worker(self) -> None:
        """Its sweeper, a thread of it, dies with it."""
        with suppress(psutil.NoSuchProcess):
            self._busy_worker().kill()
            self.num_kills += 1

    def kill_all_workers(self) -> None:
        """So that nobody is left to sweep."""
        for pid in self.site.workers():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.num_kills += 1

    def kill_writer(self) -> None:
        """The worker of a long job, once it has written down some of its tokens: another goes on from there."""
        assert any(self._goes_on_elsewhere(self.site.submit_long_job()) for _ in range(_TRIES))

    def _goes_on_elsewhere(self, long_job: LongJob) -> bool:
        """Whether it was resumed; on a slow machine it may be over before its worker is killed."""
        over = f"{long_job.kind} is over"
        wait_until(lambda: self._kills_writer(long_job) or long_job.has_ended, f"its tokens, or {over}", _MOST_SECONDS)
        resumed = partial(self.site.is_resumed, long_job)
        wait_until(lambda: resumed() or long_job.has_ended, f"another goes on, or {over}", _MOST_SECONDS)
        return self.site.is_resumed(long_job)

    def _kills_writer(self, long_job: LongJob) -> bool:
        (shard,) = self.site.client.ledger.shards(long_job.job.id)
        with redis_server(self.site.settings) as server, Redis.from_url(server.url) as redis:
            # The first field is its writer's name.
            if shard.lease_owner is None or redis.hlen(tokens_key(shard.id)) < 2:
                return False
        with suppress(ProcessLookupError):
            os.kill(WorkerId.parse(shard.lease_owner).pid, signal.SIGKILL)
            self.num_kills += 1
        return True

    def stop_worker(self) -> None:
        """For longer than its lease: then it goes on with rows that others have."""
        with stopped(self._busy_worker()):
            time.sleep(_LONGER_THAN_A_LEASE)

    def freeze_until_taken(self) -> None:
        """A worker with a part written and not committed, until another does its shard without it."""
        assert any(self._freezes(lambda _, written: not written) for _ in range(_TRIES))

    def freeze_until_done(self) -> None:
        """As above, until the other has even done the shard."""
        assert any(self._freezes(lambda shard, _: shard.state is ShardState.DONE) for _ in range(_TRIES))

    def _freezes(self, is_enough: Callable[[ShardRecord, list[Path]], bool]) -> bool:
        """Of a long job, as its shard is the next to be taken when it is put back."""
        site = self.site
        open_jobs = [job for job in site.long_jobs if not job.has_ended]
        if open_jobs:
            long_job = open_jobs[-1]
            site.freeze_in(long_job)
        else:
            long_job = site.submit_long_job(freezes=True)
        # Those before it, which the machine may be slow with, come first.
        written = "a part is about to be committed"
        wait_until(lambda: not site.frozen.empty() or long_job.has_ended, written, _MOST_SECONDS)
        if site.frozen.empty():
            return False
        return site.frozen.get().thaw_when(site.client.ledger, Path(long_job.job.record.output_dir), is_enough)

    def _busy_worker(self) -> psutil.Process:
        """One that has rows in flight, where there is one."""
        ledger = self.site.client.ledger
        shards = [shard for job in self.site.jobs for shard in ledger.shards(job.id)]
        pids = [WorkerId.parse(shard.lease_owner).pid for shard in shards if shard.lease_owner is not None]
        busy = [pid for pid in pids if is_alive(pid)]
        with suppress(psutil.NoSuchProcess, IndexError):
            return psutil.Process(self.site.random.choice(busy))
        return self.site.worker()

    def stop_redis(self) -> None:
        """It takes connections and answers nothing."""
        wait_until(lambda: bool(self._processes("valkey-server")), "Redis is there", _MOST_SECONDS)
        for process in self._processes("valkey-server"):
            with stopped(process):
                time.sleep(_LONGER_THAN_A_LEASE)

    def kill_api(self) -> None:
        self.site.api.kill()
        self.num_kills += 1
        self.site.api.start()

    def kill_redis(self) -> None:
        """It comes back with its data."""
        self._kill("valkey-server")

    def kill_supervisor(self) -> None:
        self._kill("embedded.supervisor")

    def _kill(self, word: str) -> None:
        wait_until(lambda: bool(self._processes(word)), f"there is a {word}", _MOST_SECONDS)
        for process in self._processes(word):
            with suppress(psutil.NoSuchProcess):
                process.kill()
                self.num_kills += 1

    def _processes(self, word: str) -> list[psutil.Process]:
        found = []
        for process in processes_of(self.site.data_dir):
            with suppress(psutil.NoSuchProcess):
                if word in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def wipe_redis(self) -> None:
        with redis_server(self.site.settings) as server, Redis.from_url(server.url) as redis:
            try:
                redis.flushall()
            except RedisError:
                # It is just being started again, after another mischief: nothing to wipe.
                return

    def restart_redis_empty(self) -> None:
        self.wipe_redis()
        self.kill_redis()

    def ring_twice(self) -> None:
        """Send every shard's message again, done, running or not, and some that mean nothing."""
        site = self.site
        known = [shard.id for job in site.jobs for shard in site.client.ledger.shards(job.id)]
        with redis_server(site.settings) as server:
            app = create_app(server.url)
            send_shards(app, site.job.record.queue, [*known, "job_none/00000", "nonsense"])
            ring_for_requests(app, live_queue(str(site.model), Precision()), ["req_" + 24 * "0", "nonsense"])
            app.close()

    def take_database_away(self) -> None:
        """Nobody can write, for longer than a lease."""
        with self.site.database.away():
            time.sleep(self.site.scale.database_seconds)

    def fill_disk(self) -> None:
        with self.site.disk.full():
            time.sleep(1.0)

    def limit_files(self) -> None:
        """No file that a worker writes can grow beyond what the smallest part needs, its ledger's included."""
        worker = self.site.worker()
        with suppress(ProcessLookupError):
            _, hard = resource.prlimit(worker.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (256, hard))
            time.sleep(1.0)
            resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (hard, hard))
