"""`POST /tokenize` and `/detokenize`, as vLLM's server has them: what a prompt takes, before it is sent."""

from collections.abc import Callable
from typing import Annotated, Any, Self, TypeVar

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field, model_validator

from ..errors import ErrorBody
from ..json_body import expect_json
from ..models import ServedModels
from ..schemas import Text
from ..state import models_of
from .chat_schemas import ChatCompletionRequest, ChatTemplateKwargs, Message, ReasoningEffort
from .request_body import Body, Unsupported, misfit, parse_body
from .route import OpenAIRoute
from .tools import ChatToolChoice, Tool

TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
PATHS = (TOKENIZE, DETOKENIZE)
_RESPONSES: dict[int | str, dict[str, Any]] = {404: {"model": ErrorBody, "description": "The model is not served here"}}
_NOT_OF_CHATS = {"model", "prompt", "add_special_tokens", "return_token_strs"}
T = TypeVar("T")


class _OfModel(Body):
    model: Annotated[str | None, Field(description="Need not be said where one model is served")] = None


class TokenizeRequest(_OfModel):
    """A text (`prompt`), or a conversation (`messages`) with what its chat template is told in chats."""

    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: Annotated[
        bool | None, Field(description="false: without what the tokenizer puts around a text; a chat's template does")
    ] = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: ChatTemplateKwargs = None
    documents: list[dict[Text, Text]] | None = None
    reasoning_effort: ReasoningEffort = None
    tools: list[Tool] | None = None
    tool_choice: ChatToolChoice | None = None
    chat_template: Unsupported = None
    mm_processor_kwargs: Unsupported = None
    return_token_strs: Annotated[bool | None, Field(description="true: each token as the vocabulary has it")] = None

    @model_validator(mode="after")
    def _can_be_done(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise misfit("prompt", "prompt or messages: give one of the two")
        if self.messages is not None and self.add_special_tokens:
            problem = "add_special_tokens: a chat's template writes them itself: leave it out"
            raise misfit("add_special_tokens", problem)
        return self

    def as_chat(self, model: str) -> ChatCompletionRequest:
        """The conversation, as it would be sent. Raises `ApiError` (400)."""
        given = self.model_dump(exclude=_NOT_OF_CHATS, exclude_unset=True)
        return parse_body(ChatCompletionRequest, {"model": model, **given})


class TokenizeResponse(BaseModel):
    """`max_model_len`: tokens of prompt and answer together."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str | None] | None


class DetokenizeRequest(_OfModel):
    tokens: list[int]


class DetokenizeResponse(BaseModel):
    """The text of the tokens, special ones included."""

    prompt: str


Models = Annotated[ServedModels, Depends(models_of)]
router = APIRouter(tags=["openai"], route_class=OpenAIRoute, dependencies=[Depends(expect_json)], responses=_RESPONSES)


@router.post(TOKENIZE)
async def tokenize(body: TokenizeRequest, request: Request, models: Models) -> TokenizeResponse:
    """The tokens of a prompt, as a completion or a chat would have them. No worker has to run."""
    return await _in_turn(request, lambda: _tokenized(body, models))


@router.post(DETOKENIZE)
async def detokenize(body: DetokenizeRequest, request: Request, models: Models) -> DetokenizeResponse:
    """The text of tokens. No worker has to run."""
    return await _in_turn(request, lambda: _detokenized(body, models))


async def _in_turn(request: Request, work: Callable[[], T]) -> T:
    return await run_sync(work, limiter=request.app.state.asking_turns)


def _detokenized(body: DetokenizeRequest, models: ServedModels) -> DetokenizeResponse:
    return DetokenizeResponse(prompt=models.named_or_only(body.model).prompts.decoded(body.tokens))


def _tokenized(body: TokenizeRequest, models: ServedModels) -> TokenizeResponse:
    model = models.named_or_only(body.model)
    prompts = model.prompts
    if body.prompt is not None:
        tokens = prompts.encoded(body.prompt, body.add_special_tokens is not False)
    else:
        tokens = prompts.chat(*body.as_chat(model.name).prompt_parts).token_ids
    return TokenizeResponse(
        count=len(tokens),
        max_model_len=prompts.context_length,
        tokens=tokens,
        token_strs=[prompts.tokenizer.fast.id_to_token(token) for token in tokens] if body.return_token_strs else None,
    )
