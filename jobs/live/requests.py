"""Interactive requests: what is asked, and how a producer hands it over, calls it off and asks after it.

A request's answer comes as a stream (`jobs/streams`): that of its first sample has the request's id, that of sample
k > 0 the id `<request id>/<k>` (`stream_ids`).
"""

import logging
import re
import secrets
import time
from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Annotated, Any, Self

from celery import Celery
from pydantic import BaseModel, ConfigDict, Field
from redis.exceptions import RedisError

from ...storage.ledger.records import DEFAULT_TENANT
from ..broker.celery_app import ring_for_requests
from ..broker.redis_access import server_time, text_client
from ..errors import JobError
from ..rare_warnings import RareWarnings
from ..spec.lora import LoraModule
from ..spec.sampling import SamplingSpec
from ..spec.stored import read_stored
from ..streams.connections import UNREACHABLE
from .keys import CANCEL_CHANNEL, PROBE_KEY, open_key, request_key, tenant_key
from .scripts import CANCEL, SUBMIT

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_SECONDS = 3600.0
# How long after its deadline an answer may still come: a worker that takes a request late says so in its stream.
_OVERDUE_SECONDS = 5.0
_ANY_NUMBER = 2**53
# Redis does nothing else meanwhile: some 2 ms.
_REQUESTS_PER_CALL = 64
REQUEST_ID = re.compile(r"req_[0-9a-f]{24}", re.ASCII)


def new_request_id() -> str:
    """What `REQUEST_ID` matches."""
    return f"req_{secrets.token_hex(12)}"


class UnknownRequest(JobError):
    """There is no such request, or it was forgotten a while after it had ended."""


class LiveState(StrEnum):
    """How a request stands. One whose worker died is `RUNNING` until another takes it."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


class LiveRequest(BaseModel):
    """One prompt that somebody waits for. Make one with `new`.

    `queue`: as `live_queue` names it. `created_at` and `deadline_at`: Unix seconds; past its deadline a request ends
    with the error `deadline_exceeded`, whatever it has by then. `reply_to`: the reader that is to get all its tokens
    in frames (`streams/hub.py`). `sampling.seed` is used as it is: whoever wants samples to differ draws one
    (`new_seed`), so that another attempt goes on with the same answer. `weight`: the tenant's
    (`storage/ledger/tenants.py`). `images`: the files of those in the prompt, in base64.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: Annotated[str, Field(pattern=f"^{REQUEST_ID.pattern}$")]
    queue: str
    model: str
    prompt_token_ids: tuple[int, ...]
    images: tuple[str, ...] = ()
    sampling: SamplingSpec = SamplingSpec()
    choices: tuple[str, ...] | None = None
    lora: LoraModule | None = None
    tenant: str = DEFAULT_TENANT
    weight: int = 1
    reply_to: str | None = None
    created_at: float
    deadline_at: float

    @classmethod
    def new(
        cls,
        *,
        queue: str,
        model: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingSpec,
        images: Sequence[bytes] = (),
        choices: Sequence[str] | None = None,
        lora: LoraModule | None = None,
        tenant: str = DEFAULT_TENANT,
        weight: int = 1,
        reply_to: str | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    ) -> Self:
        """A request of now, with an id of its own.

        Raises `InvalidRequestError` naming a sampling field out of its range.
        """
        now = time.time()
        request = cls(
            id=new_request_id(),
            queue=queue,
            model=model,
            prompt_token_ids=tuple(prompt_token_ids),
            images=tuple(b64encode(image).decode() for image in images),
            sampling=sampling,
            choices=None if choices is None else tuple(choices),
            lora=lora,
            tenant=tenant,
            weight=weight,
            reply_to=reply_to,
            created_at=now,
            deadline_at=now + timeout_seconds,
        )
        request.sampling.params(request.choices)
        return request

    @property
    def image_files(self) -> tuple[bytes, ...]:
        return tuple(map(b64decode, self.images))

    @property
    def stream_ids(self) -> tuple[str, ...]:
        """The streams of its `sampling.n` answers, in order."""
        return (self.id, *(f"{self.id}/{sample}" for sample in range(1, self.sampling.n)))

    @property
    def most_tokens(self) -> int:
        """Those of its prompt, and the most that its answers may have."""
        return len(self.prompt_token_ids) + self.sampling.n * self.sampling.max_tokens

    @property
    def is_overdue(self) -> bool:
        """Whether its deadline is so long past that no worker will end it any more."""
        return self.deadline_at + _OVERDUE_SECONDS < time.time()


def new_seed() -> int:
    """A seed for a request whose user gave none."""
    return secrets.randbits(63)


def keys_of(request: LiveRequest) -> list[str]:
    """The keys of the scripts `REGISTER` and `SUBMIT`: the request, the queue's open ones and the tenant's."""
    return [request_key(request.id), open_key(request.queue), tenant_key(request.tenant)]


def registration(
    request: LiveRequest,
    ttl_seconds: float,
    state: LiveState,
    attempt: int = 0,
    owner: str = "",
    lease_seconds: float = 0.0,
    crashes: int = 0,
    failures: int = 0,
) -> list[str | int | float]:
    """The arguments of a request for the scripts `REGISTER` and `SUBMIT`."""
    # What nobody asked for is not in it: a worker of an earlier version may not know the field.
    spec, deadline = request.model_dump_json(exclude_defaults=True), request.deadline_at
    known: list[str | int | float] = [request.id, spec, request.queue, request.tenant, deadline, ttl_seconds]
    return [*known, str(state), attempt, owner, lease_seconds, crashes, failures]


@dataclass(frozen=True)
class LiveRecord:
    """What Redis knows of a request. `attempt`: how many workers have taken it; `owner`: who did so last."""

    request: LiveRequest
    state: LiveState
    attempt: int
    owner: str | None
    is_cancelled: bool


class LiveRequests:
    """The producers' side of live requests. Thread-safe; a context manager that closes its connections.

    Every method raises redis' errors when Redis does not answer. `ttl_seconds`: how long an ended request is known.
    """

    def __init__(self, redis_url: str, app: Celery, ttl_seconds: float = 3600.0) -> None:
        self._redis = text_client(redis_url)
        self._app = app
        self._ttl_seconds = ttl_seconds
        self._submit = self._redis.register_script(SUBMIT)
        self._cancel = self._redis.register_script(CANCEL)
        self._warnings = RareWarnings(logger)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._redis.close()

    def submit(self, *requests: LiveRequest) -> None:
        """Queue requests and ring for workers. Harmless when repeated: a request that is known is not queued again."""
        self.register([requests])
        self.ring(*requests)

    def register(self, groups: Sequence[Sequence[LiveRequest]], most_open: int = _ANY_NUMBER) -> list[bool]:
        """Queue groups of requests, each of one queue, without a bell: which were, as one of them is whole or not.

        One is not where more than `most_open` of its queue would be open with it, unless it is alone.
        """
        are_taken = [True] * len(groups)
        counted = [
            (number, request, 0 if place else len(group))
            for number, group in enumerate(groups)
            for place, request in enumerate(group)
        ]
        for start in range(0, len(counted), _REQUESTS_PER_CALL):
            some = [each for each in counted[start : start + _REQUESTS_PER_CALL] if are_taken[each[0]]]
            arguments = [(*registration(each, self._ttl_seconds, LiveState.QUEUED), size) for _, each, size in some]
            answers: Any = self._submit(
                keys=[key for _, each, _ in some for key in keys_of(each)],
                args=[most_open, *chain.from_iterable(arguments)],
            )
            for (number, _, _), is_taken in zip(some, answers, strict=True):
                are_taken[number] = are_taken[number] and bool(is_taken)
        return are_taken

    def ring(self, *requests: LiveRequest) -> None:
        """Tell workers of requests that are queued."""
        ids: dict[str, list[str]] = {}
        for request in requests:
            ids.setdefault(request.queue, []).append(request.id)
        for queue, request_ids in ids.items():
            ring_for_requests(self._app, queue, request_ids)

    def cancel(self, request_id: str) -> bool:
        """Have a request end soon, with the finish reason "abort"; false when it is unknown or has ended.

        One that waits ends when its turn comes; one that runs gives its KV blocks back at the engine's next step.
        """
        return bool(self._cancel(keys=[request_key(request_id)], args=[request_id, CANCEL_CHANNEL, tenant_key("")]))

    def get(self, request_id: str) -> LiveRecord:
        """Raises `UnknownRequest`, or `LaterVersion` where it asks for what is not known here."""
        known: Any = self._redis.hgetall(request_key(request_id))
        if "spec" not in known:
            raise UnknownRequest(f"there is no request {request_id}")
        return LiveRecord(
            request=read_stored(LiveRequest, known["spec"], "request"),
            state=LiveState(known["state"]),
            attempt=int(known["attempt"]),
            owner=known["owner"] or None,
            is_cancelled="cancelled" in known,
        )

    def accept_writes(self) -> bool:
        """Whether Redis takes anything in; a full disk or memory, or a failover, lets it answer and refuse.

        True of one that does not answer: whoever waits is waiting for its return.
        """
        try:
            self._redis.set(PROBE_KEY, "", px=1000)
        except UNREACHABLE:
            return True
        except RedisError as error:
            self._warnings.warn(f"Redis takes nothing in: {error}")
            return False
        return True

    def num_waiting(self, queue: str) -> int:
        """How many requests of a queue no worker has (any more)."""
        now = server_time(self._redis)
        return int(self._redis.zcount(open_key(queue), "-inf", now))

    def num_unanswered(self, queue: str) -> int:
        """How many requests of a queue have not ended, those that workers have included."""
        return int(self._redis.zcard(open_key(queue)))

    def num_open(self, tenant: str) -> int:
        """How many requests of a tenant have neither ended nor been cancelled."""
        return int(self._redis.zcount(tenant_key(tenant), server_time(self._redis), "+inf"))
