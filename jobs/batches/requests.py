"""A batch's requests as the rows of a job."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from ...engine.sampling.defaults import SamplingDefaults
from ...engine.sampling_params import derived_seed
from ...engine.text.chat_ending import ChatEnding
from ...storage.readers import InputRow, InputSource
from ..api.errors import ApiError
from ..api.openai.chat_schemas import ChatCompletionRequest
from ..api.openai.completion_schemas import DEFAULT_MAX_TOKENS, CompletionRequest
from ..api.openai.expected_calls import expected_calls
from ..api.openai.reasoning import with_reasoning
from ..api.openai.request_body import parse_body
from ..api.openai.response_schemas import ResponsesRequest, renamed
from ..api.openai.route import refusals
from ..api.openai.sampling_schemas import SamplingFields
from ..calls.grammar import json_or_calls
from ..live.prompt import LivePrompts
from ..planning.rendering import CHAT_ENDING, TEMPLATE_KWARGS
from ..shards.row_sampling import RowSampling
from ..spec.schemas import JobSpec
from ..spec.tools import TOOLS
from .lines import CHAT, CHATS, RESPONSES, BatchLine, lines_of, parse_line

# The columns of a batch's rows beside `custom_id` and the prompt: what was wrong with a request, the text that is to
# stand in front of its answer, whether there is to be none, whether what was thought is left out, how its calls of
# tools are to be found, and what a response says of its request.
REQUEST_ERROR = "request_error"
ECHO = "echo"
ECHOES_ONLY = "echoes_only"
OMIT_REASONING = "omit_reasoning"
CALL_FORMAT = "call_format"
TOLD_AGAIN = "told_again"


@dataclass(frozen=True)
class RequestReader:
    """Turns request bodies into rows. `key` is what requests without a seed derive theirs from.

    `defaults`: what requests do not say of how they are sampled.
    """

    endpoint: str
    prompts: LivePrompts
    key: str
    defaults: SamplingDefaults = field(default_factory=dict)

    @classmethod
    def of(cls, endpoint: str, spec: JobSpec) -> Self:
        """That of a batch's job, for which it makes the same rows each time. Raises `ModelError`."""
        return cls(endpoint, LivePrompts.of(spec.model), str(spec.sampling.seed), spec.sampling_defaults)

    def row(self, number: int, line: BatchLine) -> InputRow:
        """The row of a line; a request that can not be answered is an error row, its error as a body has it."""
        values: dict[str, Any] = {"custom_id": line.custom_id}
        try:
            with renamed() if self.endpoint == RESPONSES else nullcontext(), refusals():
                request, response = self._parse(line.body)
                sampling = self._sampling(request, number)
                values |= self._prompt(request)
                if response is not None:
                    values[TOLD_AGAIN] = json.dumps(response.told_again(sampling.sampling))
        except ApiError as error:
            values[REQUEST_ERROR] = {"message": str(error.detail), "param": error.param, "code": error.code}
            return InputRow(number, values, str(error.detail))
        return InputRow(number, values, sampling=sampling.to_json())

    def _parse(
        self, body: Mapping[str, Any]
    ) -> tuple[ChatCompletionRequest | CompletionRequest, ResponsesRequest | None]:
        """The request, and what it was made of where it asks for a response."""
        request: ChatCompletionRequest | CompletionRequest
        response = None
        if self.endpoint == CHAT:
            request = parse_body(ChatCompletionRequest, body)
        elif self.endpoint == RESPONSES:
            response = parse_body(ResponsesRequest, body)
            request = response.as_chat()
        else:
            request = parse_body(CompletionRequest, body)
        if request.stream:
            raise ApiError(
                400, "stream: answers of a batch can not be streamed: leave it out", "invalid_value", "stream"
            )
        return request, response

    def _sampling(self, request: SamplingFields, number: int) -> RowSampling:
        tokenizer = self.prompts.tokenizer
        # Where the request does not say, as of a live one.
        most = DEFAULT_MAX_TOKENS if isinstance(request, CompletionRequest) else self.prompts.context_length
        sampling = request.sampling(most, derived_seed(f"{self.key}/{number}"), self.defaults)
        sampling.check_vocabulary(self.prompts.vocab_size)
        # Refuses words without tokens.
        tokenizer.encode_bad_words(sampling.bad_words)
        if isinstance(request, ChatCompletionRequest):
            asked = request.include_reasoning, request.thinking_token_budget, request.begun
            sampling = with_reasoning(sampling, tokenizer, request.told_template, *asked)
            calls = expected_calls(request, tokenizer)
            sampling = json_or_calls(sampling, calls, request.callable_functions, tokenizer)
            # Refuses what cannot be beside that.
            sampling.params(request.choices)
        return RowSampling(sampling=sampling, choices=request.choices)

    def _prompt(self, request: ChatCompletionRequest | CompletionRequest) -> dict[str, Any]:
        if isinstance(request, ChatCompletionRequest):
            return self._chat(request)
        if len(request.prompt) != 1:
            raise ApiError(400, "prompt: a line of a batch has one prompt", "invalid_value", "prompt")
        (prompt,) = request.prompt
        if isinstance(prompt, str):
            echo = {ECHO: prompt, ECHOES_ONLY: request.echoes_only} if request.echo else {}
            return {"prompt": prompt, **echo}
        self._check_tokens(prompt)
        if request.echo:
            raise ApiError(400, "echo: needs a prompt that is a text in a batch", "unsupported_parameter", "echo")
        return {"prompt": list(prompt)}

    def _chat(self, request: ChatCompletionRequest) -> dict[str, Any]:
        messages = [message.for_template() for message in request.messages]
        # As JSON: each request has names of its own.
        kwargs = request.told_template
        told: dict[str, Any] = {TEMPLATE_KWARGS: json.dumps(kwargs)} if kwargs else {}
        if request.ending is not ChatEnding.ANSWER:
            # Refuses a last message without a text.
            request.ending.marked(messages)
            told[CHAT_ENDING] = request.ending.value
        if request.echoed:
            told[ECHO] = request.echoed
        if request.include_reasoning is False:
            told[OMIT_REASONING] = True
        return {"messages": messages, **told, **self._tools(request)}

    def _tools(self, request: ChatCompletionRequest) -> dict[str, Any]:
        if not request.tools:
            return {}
        calls = expected_calls(request, self.prompts.tokenizer)
        told = {} if calls is None else {CALL_FORMAT: calls.to_json()}
        if self.prompts.tokenizer.tools_template_has(TOOLS):
            told[TOOLS] = json.dumps([tool.for_template() for tool in request.callable_tools])
        return told

    def _check_tokens(self, prompt: Sequence[int]) -> None:
        if (token := max(prompt)) >= self.prompts.vocab_size:
            message = f"prompt: token id {token} is outside the vocabulary of {self.prompts.vocab_size} tokens"
            raise ApiError(400, message, "invalid_value", "prompt")


class BatchInput(InputSource):
    """An input file whose lines were checked, as the rows of a job, or `only` some of them.

    `on_row` is called now and then, and may raise.
    """

    def __init__(
        self,
        path: Path,
        sha256: str,
        reader: RequestReader,
        on_row: Callable[[], None],
        only: Collection[int] | None = None,
    ) -> None:
        super().__init__(path.name, None)
        self._only = only
        self._path = path
        self._sha256 = sha256
        self._reader = reader
        self._on_row = on_row
        self._columns = {"custom_id": None, "messages" if reader.endpoint in CHATS else "prompt": None}

    def fingerprint(self) -> str:
        return self._sha256

    def _rows(self) -> Iterator[InputRow]:
        for row, (number, text) in enumerate(lines_of(self._path)):
            self._on_row()
            if self._only is None or row in self._only:
                yield self._reader.row(row, parse_line(number, text, self._reader.endpoint))
