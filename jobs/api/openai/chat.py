"""`POST /v1/chat/completions`."""

from functools import partial

from fastapi import APIRouter, Depends, Request, Response

from ..json_body import expect_json
from .answer_bodies import Head, chat_completion
from .chat_schemas import ChatCompletionRequest
from .chunks import ChatChunks
from .described import COMPLETION_RESPONSES
from .http_answers import respond, respond_in_chunks
from .route import OpenAIRoute, asker_of, in_turn
from .running_usage import RunningUsage

router = APIRouter(prefix="/v1", tags=["openai"], route_class=OpenAIRoute)


@router.post("/chat/completions", dependencies=[Depends(expect_json)], responses=COMPLETION_RESPONSES)
async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answer a conversation, at once or in chunks (`stream`). A worker for the model has to run."""
    asked = await in_turn(request, asker_of(request).chat, body)
    head = Head.chat(asked.id, asked.model.name, asked.model.answers_as)
    if body.stream:
        running = RunningUsage(asked) if body.includes_running_usage else None
        chunks = ChatChunks(head, body.includes_usage, asked.has_logprobs, running, body.echoed)
        return respond_in_chunks(request, asked, chunks, body.includes_usage, running)
    return await respond(request, asked, partial(chat_completion, head))
