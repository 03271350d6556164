"""The routes under `/v1`: their errors are OpenAI's, and each answer says which request it belongs to."""

import asyncio
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from anyio import CapacityLimiter
from anyio.to_thread import run_sync
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.requests import HTTPConnection

from ....engine.errors import InvalidRequestError, ModelError
from ...errors import SpecError
from ..errors import ApiError
from ..event_stream import ClientGone, ServerStops, never, while_wanted
from ..request_ids import name_request
from ..wording import with_fields
from ..worker_watch import NoWorker
from .asking import Asked, Asker
from .request_body import refusal

B = TypeVar("B")
# Before a request is handed over it is some templates and tokens, and an answer of Redis to wait for. With all the
# threads that there are, in a burst each waits for the interpreter's lock of the others, and the first answer for the
# last request.
_MOST_ASKING = min(40, (os.cpu_count() or 1) + 2)


class OpenAIRoute(APIRoute):
    """What is wrong with a request is answered with 400 here, not 422."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_as_openai(request: Request) -> Response:
            try:
                with refusals():
                    return await handle(request)
            except RequestValidationError as error:
                first = error.errors()[0]
                if first["type"] == "json_invalid":
                    raise
                # Without the first part, which says where in the request the field is.
                raise refusal(first, first["loc"][1:]) from error

        return handle_as_openai


@contextmanager
def refusals() -> Iterator[None]:
    """Raises `ApiError` (400), naming the field at fault, for what is wrong with a request."""
    try:
        yield
    except SpecError as error:
        field = error.field.removeprefix("sampling.") if error.field else None
        raise ApiError(400, with_fields(error), "invalid_value", field) from error
    except InvalidRequestError as error:
        param = "logprobs" if error.field == "prompt_logprobs" else error.field
        raise ApiError(400, str(error), getattr(error, "code", "invalid_value"), param) from error
    except ModelError as error:
        raise ApiError(400, str(error), "invalid_value", "model") from error


def asker_of(connection: HTTPConnection) -> Asker:
    """What hands this request's body to workers."""
    state = connection.app.state
    return Asker(state.service.models, state.live, state.admission, connection)


def asking_turns() -> CapacityLimiter:
    """For an application's state, as `asking_turns`: how many requests are handed over to workers at a time."""
    return CapacityLimiter(_MOST_ASKING)


async def in_turn(connection: HTTPConnection, hand_over: Callable[[B], Asked], body: B) -> Asked:
    """What a method of `asker_of(connection)` makes of a body, in a thread, once it is with the workers.

    Where the model's worker has gone silent it is waited for, as long as the client does. Raises what the method does,
    and redis' errors.
    """
    arrived_at = time.perf_counter()
    asked = await _handed_over(connection, hand_over, body)
    asked.arrived_at = arrived_at
    name_request(connection, asked.id)
    try:
        # Others' submissions go on when this one is not waited for any more.
        await asyncio.shield(asyncio.wrap_future(asked.submitted))
    except BaseException:
        asked.admissions.close()
        connection.app.state.live.forget(asked.requests)
        raise
    return asked


async def _handed_over(connection: HTTPConnection, hand_over: Callable[[B], Asked], body: B) -> Asked:
    state = connection.app.state
    try:
        return await run_sync(hand_over, body, limiter=state.asking_turns)
    except NoWorker as missing:
        if not missing.may_return:
            raise
        receive = connection.receive if isinstance(connection, Request) else never
        try:
            await while_wanted(state.live.workers.wait_for(missing.model), receive, state.stopping)
        except (ClientGone, ServerStops):
            raise missing from None
    return await run_sync(hand_over, body, limiter=state.asking_turns)
