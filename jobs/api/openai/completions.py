"""`POST /v1/completions`."""

from functools import partial

from fastapi import APIRouter, Depends, Request, Response

from ..json_body import expect_json
from .answer_bodies import Head, text_completion
from .completion_schemas import CompletionRequest
from .described import COMPLETION_RESPONSES
from .http_answers import respond, respond_in_chunks
from .route import OpenAIRoute, asker_of, in_turn
from .running_usage import RunningUsage
from .text_chunks import TextChunks

router = APIRouter(prefix="/v1", tags=["openai"], route_class=OpenAIRoute)


@router.post("/completions", dependencies=[Depends(expect_json)], responses=COMPLETION_RESPONSES)
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continue texts, at once or in chunks (`stream`). A worker for the model has to run."""
    asked = await in_turn(request, asker_of(request).completions, body)
    head = Head.text(asked.id, asked.model.name, asked.model.answers_as)
    if body.stream:
        running = RunningUsage(asked) if body.includes_running_usage else None
        chunks = TextChunks(head, body.includes_usage, asked, running)
        return respond_in_chunks(request, asked, chunks, body.includes_usage, running)
    return await respond(request, asked, partial(text_completion, head))
