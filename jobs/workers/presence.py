"""Which workers are alive: in Redis, one sorted set a queue, each worker with the time until which it is believed."""

import os
import socket
import uuid
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from redis.exceptions import RedisError

from ..broker.redis_access import server_time, text_client
from ..processes import is_alive

TTL_SECONDS = 5.0
RENEW_SECONDS = 1.0
# After that long without a word a worker that has not said goodbye is given up: it may only have been starved.
SILENCE_SECONDS = 30.0
_LEDGER_CHARACTERS = 12
_PROBE_KEY = "headrace:probe"
_REDIS_SECONDS = 2.0


@dataclass(frozen=True)
class WorkerId:
    """Names a worker process among all hosts and all times; `str` of it is what others see.

    `token`: what tells it from others of its host, and behind an @ whose jobs it answers.
    """

    host: str
    pid: int
    token: str

    @classmethod
    def own(cls, ledger: str | None = None) -> Self:
        """That of this process. `ledger`: the identity of the one whose jobs it answers."""
        answers = "" if ledger is None else f"@{ledger[:_LEDGER_CHARACTERS]}"
        return cls(socket.gethostname(), os.getpid(), uuid.uuid4().hex[:8] + answers)

    @classmethod
    def parse(cls, text: str) -> Self:
        host, pid, token = text.rsplit(":", 2)
        return cls(host, int(pid), token)

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}:{self.token}"

    def answers_jobs_of(self, ledger: str | None) -> bool:
        """Whether a ledger's jobs may be its; None is any ledger. A worker of before does not say."""
        _, _, own = self.token.partition("@")
        return ledger is None or not own or ledger.startswith(own)

    @property
    def is_known_dead(self) -> bool:
        """Whether it ran on this host and its process is gone."""
        return self.is_here and not is_alive(self.pid)

    @property
    def is_here(self) -> bool:
        """Whether it runs, or ran, on this host."""
        return self.host == socket.gethostname()

    def is_one_of(self, pids: Collection[int]) -> bool:
        """Whether it is one of these processes of this host."""
        return self.pid in pids and self.is_here


@dataclass(frozen=True)
class Worker:
    """One that is alive. `stats`: of its engine, by the names of `EngineStats`. `model`: None where it tells none."""

    name: str
    queue: str
    stats: Mapping[str, float]
    model: str | None


class WorkerPresence:
    """Keys `headrace:workers:<queue>`; members are worker ids, scores seconds of the Redis server's clock.

    A member stays for `SILENCE_SECONDS` after it was believed last.

    Beside them a hash `headrace:engine:<worker id>` with what a worker tells of its engine, and for each queue the
    strings `headrace:model:<queue>`, the model of its workers, and `headrace:loading:<queue>`, who last said that a
    worker is about to serve it. With a `ledger`, its identity, only workers that answer its jobs serve a queue.
    """

    def __init__(self, redis_url: str, ledger: str | None = None) -> None:
        self._ledger = ledger
        self._redis = text_client(redis_url, _REDIS_SECONDS)

    def ping(self) -> None:
        """Raises redis' errors when the server does not answer."""
        self._redis.ping()

    def expect_room(self) -> None:
        """Raises redis' errors where the server does not answer, or takes nothing in: then no worker is heard of."""
        self._redis.set(_PROBE_KEY, "", px=1)

    def announce(
        self, queue: str, worker: WorkerId, stats: Mapping[str, float] | None = None, model: str | None = None
    ) -> None:
        """Be alive for the next `TTL_SECONDS`, with what there is to tell of the engine. Raises redis' errors."""
        now = server_time(self._redis)
        with self._redis.pipeline() as pipe:
            pipe.zremrangebyscore(_key(queue), 0, now - SILENCE_SECONDS)
            pipe.zadd(_key(queue), {str(worker): now + TTL_SECONDS})
            pipe.pexpire(_key(queue), int((TTL_SECONDS + SILENCE_SECONDS) * 1000))
            if stats:
                pipe.hset(_stats_key(worker), items=[item for pair in stats.items() for item in pair])
                pipe.pexpire(_stats_key(worker), int(TTL_SECONDS * 1000))
            if model is not None:
                # Longer than a worker is believed in: it is asked for after those are listed.
                pipe.set(_model_key(queue), model, px=int((TTL_SECONDS + SILENCE_SECONDS) * 1000))
            pipe.execute()

    def announce_loading(self, queue: str, loader: WorkerId) -> None:
        """Say for the next `TTL_SECONDS` that a worker is about to serve the queue. Raises redis' errors."""
        self._redis.set(_loading_key(queue), str(loader), px=int(TTL_SECONDS * 1000))

    def is_loading(self, queue: str) -> bool:
        """Whether a worker is about to serve the queue; false when Redis does not answer."""
        try:
            loader = self._redis.get(_loading_key(queue))
        except RedisError:
            return False
        return loader is not None and not WorkerId.parse(str(loader)).is_known_dead

    def withdraw(self, queue: str, worker: WorkerId) -> None:
        """Be gone at once, where Redis still answers."""
        with suppress(RedisError):
            self._redis.zrem(_key(queue), str(worker))

    def is_served(self, queue: str, apart_from: Collection[int] = ()) -> bool:
        """Whether some worker listens to the queue; false when Redis does not answer.

        `apart_from`: pids of processes of this host that do not count.
        """
        return any(not worker.is_one_of(apart_from) for worker in self._workers(queue, silent_seconds=0.0))

    def num_workers(self, queues: Collection[str]) -> dict[str, int]:
        """How many workers listen to each of some queues. Raises redis' errors."""
        if not queues:
            return {}
        alive = (f"({server_time(self._redis)}", "+inf")
        with self._redis.pipeline(transaction=False) as pipe:
            for queue in queues:
                pipe.zrange(_key(queue), *alive, byscore=True)
            found = pipe.execute()
        return {queue: len(self._alive_of(names)) for queue, names in zip(queues, found, strict=True)}

    def may_be_served_again(self, queue: str) -> bool:
        """Whether some worker has been heard of lately, is not known to be dead and has not said goodbye."""
        return bool(self._workers(queue, SILENCE_SECONDS))

    def is_alive_here(self, queue: str, apart_from: Collection[int] = ()) -> bool:
        """Whether a worker that has been heard of lately runs on this host, silent now or not."""
        workers = self._workers(queue, SILENCE_SECONDS)
        return any(worker.is_here and not worker.is_one_of(apart_from) for worker in workers)

    def has_served(self, queue: str, pid: int) -> bool:
        """Whether a process of this host listened to the queue lately, and has not said goodbye; dead now or not.

        True when Redis does not answer.
        """
        try:
            names = self._redis.zrange(_key(queue), 0, -1)
        except RedisError:
            return True
        return any(WorkerId.parse(str(name)).is_one_of([pid]) for name in names)

    def _workers(self, queue: str, silent_seconds: float) -> list[WorkerId]:
        """Those that were believed until so long ago at most, or still are, and are not known to be dead."""
        try:
            since = server_time(self._redis) - silent_seconds
            names = self._redis.zrange(_key(queue), f"({since}", "+inf", byscore=True)
        except RedisError:
            return []
        return self._alive_of(names)

    def _alive_of(self, names: Iterable[object]) -> list[WorkerId]:
        found = map(WorkerId.parse, map(str, names))
        return [each for each in found if not each.is_known_dead and each.answers_jobs_of(self._ledger)]

    def hosts(self) -> set[str]:
        """The hosts on which a worker, of whatever queue, is alive. Raises redis' errors."""
        return {WorkerId.parse(name).host for _, name in self._alive()}

    def workers(self) -> list[Worker]:
        """All that are alive, of whatever queue, and what they tell. Raises redis' errors."""
        found = self._alive()
        with self._redis.pipeline(transaction=False) as pipe:
            for queue, name in found:
                pipe.hgetall(_stats_key(name))
                pipe.get(_model_key(queue))
            told = pipe.execute() if found else []
        return [
            Worker(name, queue, {stat: float(value) for stat, value in stats.items()}, model)
            for (queue, name), stats, model in zip(found, told[::2], told[1::2], strict=True)
        ]

    def _alive(self) -> list[tuple[str, str]]:
        """The queue and the name of each worker that is believed to be alive."""
        alive = (f"({server_time(self._redis)}", "+inf")
        keys = sorted(map(str, self._redis.scan_iter(_key("*"))))
        return [
            (key.removeprefix(_key("")), str(name))
            for key in keys
            for name in self._redis.zrange(key, *alive, byscore=True)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._redis.close()


def _key(queue: str) -> str:
    return f"headrace:workers:{queue}"


def _loading_key(queue: str) -> str:
    return f"headrace:loading:{queue}"


def _model_key(queue: str) -> str:
    return f"headrace:model:{queue}"


def _stats_key(worker: object) -> str:
    return f"headrace:engine:{worker}"
