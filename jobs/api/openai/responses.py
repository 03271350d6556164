"""`POST /v1/responses`."""

from fastapi import APIRouter, Depends, Request, Response

from ..errors import ApiError
from ..json_body import expect_json
from .answer_bodies import Head
from .described import RESPONSE_RESPONSES
from .http_answers import respond, respond_in_chunks
from .response_bodies import response
from .response_events import ResponseEvents
from .response_schemas import NOT_KEPT, ResponsesRequest
from .route import OpenAIRoute, asker_of, in_turn

router = APIRouter(prefix="/v1", tags=["openai"], route_class=OpenAIRoute)


@router.post("/responses", dependencies=[Depends(expect_json)], responses=RESPONSE_RESPONSES)
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Answer a conversation, at once or in events (`stream`). Nothing is kept: each request has the whole of it."""
    asked = await in_turn(request, asker_of(request).response, body)
    head = Head.response(asked.id, asked.model.name, asked.model.answers_as)
    told_again = body.told_again(asked.requests[0].sampling)
    if body.stream:
        return respond_in_chunks(request, asked, ResponseEvents(head, told_again), True, None)
    return await respond(request, asked, lambda answers, usage: response(head, told_again, answers[0], usage))


@router.api_route("/responses/{response_id}", methods=["GET", "DELETE"], include_in_schema=False)
async def kept_response(response_id: str) -> Response:
    """What clients of OpenAI's ask for later, where `store` keeps it."""
    raise ApiError(404, f"response {response_id!r} does not exist: {NOT_KEPT}", "response_not_found", "response_id")
