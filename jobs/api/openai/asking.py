"""From a request's body to the live requests that answer it. Synchronous: templates, tokenizers and Redis take time."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field

from starlette.requests import HTTPConnection

from ...calls.events import ToolCallParser
from ...calls.grammar import json_or_calls
from ...live.prompt import LivePrompt
from ...live.requests import LiveRequest, new_seed
from ...spec.sampling import SamplingSpec
from ...streams.events import StreamEvent
from ..admission.admission import Admission
from ..admission.caller import tenant_of
from ..live_answers import LiveAnswers
from ..models import ServedModel, ServedModels
from .chat_schemas import ChatCompletionRequest
from .completion_schemas import DEFAULT_MAX_TOKENS, CompletionRequest
from .expected_calls import expected_calls
from .reasoning import ReasoningParser, with_reasoning
from .response_schemas import ResponsesRequest, renamed
from .sampling_schemas import SamplingFields


@dataclass
class Asked:
    """What is handed to workers for one response. Choice `i` is sample `i % n` of request `i // n`.

    `submitted`: that it was, or why not. `echoes`: for each choice, the text that stands in front of it, if one does;
    `echoes_only`: what is generated is left out. `parsers`: for each choice, what parts the thinking from the answer;
    `call_parsers`: likewise the calls of tools. `admissions`: closed when the response has ended. `open_choices`:
    those whose answer has not. `arrived_at`: when the request came, as `time.perf_counter` has it.
    """

    model: ServedModel
    requests: Sequence[LiveRequest]
    submitted: "Future[None]"
    cancel_on_disconnect: bool
    echoes: Sequence[str] = ()
    echoes_only: bool = False
    parsers: Sequence[ReasoningParser] = ()
    call_parsers: Sequence[ToolCallParser] = ()
    admissions: ExitStack = field(default_factory=ExitStack)
    open_choices: set[int] = field(default_factory=set)
    arrived_at: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        self.open_choices |= set(range(self.num_choices))

    @property
    def id(self) -> str:
        """The first request's, by which the response is known."""
        return self.requests[0].id

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.samples

    @property
    def samples(self) -> int:
        """How many answers each request has."""
        return self.requests[0].sampling.n

    @property
    def has_logprobs(self) -> bool:
        return self.requests[0].sampling.logprobs

    @property
    def has_prompt_logprobs(self) -> bool:
        """Whether the prompts' tokens are reported with their own: each request's first sample brings them."""
        return self.requests[0].sampling.prompt_logprobs is not None

    def echo(self, choice: int) -> str:
        return self.echoes[choice] if self.echoes else ""

    def parsed(self, choice: int, event: StreamEvent) -> StreamEvent:
        """The next event of a choice, without what is thought and called in it where that is to be parted."""
        event = self.parsers[choice].add(event) if self.parsers else event
        return self.call_parsers[choice].add(event) if self.call_parsers else event

    @property
    def open_answers(self) -> list[tuple[LiveRequest, int]]:
        """The request and the sample of each choice whose answer has not ended."""
        return [(self.requests[choice // self.samples], choice % self.samples) for choice in sorted(self.open_choices)]

    @property
    def open_requests(self) -> list[LiveRequest]:
        """The requests of which a choice's answer has not ended."""
        return [self.requests[index] for index in sorted({choice // self.samples for choice in self.open_choices})]


@dataclass(frozen=True)
class Asker:
    """Turns bodies into live requests and hands them over on behalf of `connection`'s tenant.

    Its methods raise `ApiError`, `InvalidRequestError` or `SpecError` when that can not be, `NoWorker` when nobody
    would take them, `RateLimited` when they are too many, `LedgerError` and redis' errors.
    """

    models: ServedModels
    answers: LiveAnswers
    admission: Admission
    connection: HTTPConnection

    def chat(self, body: ChatCompletionRequest) -> Asked:
        model = self.models.model(body.model)
        calls = expected_calls(body, model.prompts.tokenizer)
        prompt = model.prompts.chat(*body.prompt_parts)
        sampling = self._sampling(model, prompt, body, model.prompts.context_length)
        thinks = body.include_reasoning, body.thinking_token_budget, body.begun
        sampling = with_reasoning(sampling, model.prompts.tokenizer, body.told_template, *thinks)
        sampling = json_or_calls(sampling, calls, body.callable_functions, model.prompts.tokenizer)
        request = self._request(model, prompt, body, sampling)
        asked = self._submit(model, [request], body)
        if request.sampling.reasoning:
            tokenizer, is_told = model.prompts.tokenizer, body.include_reasoning is not False
            is_held = request.choices is not None or request.sampling.structured_outputs is not None
            told = tokenizer, prompt.token_ids, is_told, is_held
            asked.parsers = tuple(ReasoningParser(*told) for _ in range(asked.num_choices))
        asked.echoes = (body.echoed,) * asked.num_choices
        if calls is not None:
            asked.call_parsers = tuple(calls.parser(f"{asked.id}/{choice}") for choice in range(asked.num_choices))
        return asked

    def response(self, body: ResponsesRequest) -> Asked:
        with renamed():
            return self.chat(body.as_chat())

    def completions(self, body: CompletionRequest) -> Asked:
        model = self.models.model(body.model)
        prompts = model.prompts
        token_ids = [prompts.text(prompt) if isinstance(prompt, str) else list(prompt) for prompt in body.prompt]
        requests = [self._completion(model, LivePrompt(each), body) for each in token_ids]
        asked = self._submit(model, requests, body)
        if body.echo:
            asked.echoes, asked.echoes_only = _echoes(model, body), body.echoes_only
        return asked

    def _completion(self, model: ServedModel, prompt: LivePrompt, body: CompletionRequest) -> LiveRequest:
        return self._request(model, prompt, body, self._sampling(model, prompt, body, DEFAULT_MAX_TOKENS))

    @staticmethod
    def _sampling(model: ServedModel, prompt: LivePrompt, body: SamplingFields, most_tokens: int) -> SamplingSpec:
        """As the body has it; where that does not say how long an answer may be, what there is room for at most."""
        room = model.prompts.context_length - len(prompt.token_ids)
        # At least one: a prompt that leaves no room is refused for what it is.
        return body.sampling(max(1, min(most_tokens, room)), new_seed(), model.sampling_defaults)

    def _request(
        self, model: ServedModel, prompt: LivePrompt, body: SamplingFields, sampling: SamplingSpec
    ) -> LiveRequest:
        model.prompts.check(prompt.token_ids, sampling, "prompt" if isinstance(body, CompletionRequest) else "messages")
        return LiveRequest.new(
            queue=model.live_queue,
            model=model.exact_name,
            prompt_token_ids=prompt.token_ids,
            images=prompt.images,
            sampling=sampling,
            choices=body.choices,
            lora=model.lora,
            tenant=tenant_of(self.connection),
            weight=self.admission.weight_of(self.connection),
            reply_to=self.answers.reader_id,
        )

    def _submit(self, model: ServedModel, requests: list[LiveRequest], body: SamplingFields) -> Asked:
        self.answers.workers.expect(model)
        with ExitStack() as admissions:
            for request in requests:
                admitted = self.admission.admit_live(self.connection, request.queue, request.most_tokens)
                admissions.enter_context(admitted)
            submitted, goes_on = self.answers.submit(requests), body.cancel_on_disconnect is False
            return Asked(model, requests, submitted, not goes_on, admissions=admissions.pop_all())


def _echoes(model: ServedModel, body: CompletionRequest) -> list[str]:
    texts = [each if isinstance(each, str) else model.prompts.tokenizer.decode(each) for each in body.prompt]
    return [text for text in texts for _ in range(body.n or 1)]
