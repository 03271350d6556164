"""The offline face: prompts in, completions out, in this process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypedDict, TypeGuard

from .config import EngineConfig, ModelConfig
from .engine import Engine
from .errors import InvalidRequestError
from .request import Request, RequestEvent, SamplingParams
from .tokenizer import Tokenizer


class TokensPrompt(TypedDict):
    """A prompt given as token ids."""

    prompt_token_ids: list[int]


Prompt = str | TokensPrompt
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class CompletionOutput:
    """One answer. With `SamplingParams.choices`, `probabilities` has each choice's; otherwise it is None."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    probabilities: dict[str, float] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt with its answer. `num_cached_tokens`: prompt tokens whose KV came from the prefix cache."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool = True


class LLM:
    """A model ready to generate, with vLLM's names.

    `model` is a Hugging Face model folder; the options are those of `EngineConfig`. Raises `ModelError` or
    `ConfigError`, one line that says what to do.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        self._config = _engine_config(options)
        # Before the weights: a missing tokenizer is known at once, a large checkpoint takes minutes.
        ModelConfig.from_pretrained(model)
        self._tokenizer = Tokenizer.from_pretrained(model)
        self._engine = Engine.from_pretrained(model, self._config)
        self._ids = count()

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    @property
    def engine(self) -> Engine:
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; the results come in the prompts' order.

        `sampling_params` is one for all or one each. Raises `InvalidRequestError` naming the prompt that can not
        run; then none does.
        """
        many = [prompts] if _is_one(prompts) else prompts
        texts = [prompt if isinstance(prompt, str) else None for prompt in many]
        token_ids = [self._token_ids(prompt) for prompt in many]
        return self._run(texts, token_ids, _one_each(sampling_params, len(many)))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer each conversation through the model's chat template."""
        first = messages[0] if messages else None
        many = [messages] if isinstance(first, Mapping) else messages
        texts = [self._tokenizer.apply_chat_template(chat) for chat in many]  # type: ignore[arg-type]
        token_ids = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return self._run(list(texts), token_ids, _one_each(sampling_params, len(texts)))

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._tokenizer.encode(prompt)
        if not isinstance(prompt, Mapping) or "prompt_token_ids" not in prompt:
            raise InvalidRequestError('a prompt must be a text or {"prompt_token_ids": [...]}')
        return list(prompt["prompt_token_ids"])

    def _run(
        self, texts: list[str | None], token_ids: list[list[int]], params: Sequence[SamplingParams]
    ) -> list[RequestOutput]:
        choice_ids = self._choice_token_ids(params)
        requests = [
            Request(str(next(self._ids)), ids, each, choice_ids.get(tuple(each.choices or ())))
            for ids, each in zip(token_ids, params, strict=True)
        ]
        try:
            self._add_all(requests)
            answers = self._drain()
        finally:
            # After an error or Ctrl-C nothing of this call may run on in the next one.
            for request in requests:
                self._engine.abort(request.request_id)
        return [
            self._output(request, text, answers[request.request_id])
            for request, text in zip(requests, texts, strict=True)
        ]

    def _choice_token_ids(self, params: Sequence[SamplingParams]) -> dict[tuple[str, ...], tuple[tuple[int, ...], ...]]:
        """Every list of choices with its token ids; each is encoded once, however many prompts have it."""
        lists = {tuple(each.choices) for each in params if each.choices}
        return {choices: self._tokenizer.encode_choices(choices) for choices in lists}

    def _add_all(self, requests: list[Request]) -> None:
        for position, request in enumerate(requests):
            try:
                self._engine.add(request)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"prompt {position}: {error}") from error

    def _drain(self) -> dict[str, list[RequestEvent]]:
        events: dict[str, list[RequestEvent]] = {}
        while self._engine.has_work:
            for event in self._engine.step():
                events.setdefault(event.request_id, []).append(event)
        return events

    def _output(self, request: Request, text: str | None, events: list[RequestEvent]) -> RequestOutput:
        last = events[-1]
        token_ids = tuple(token for event in events for token in event.new_token_ids)
        choices = request.params.choices
        answer = self._tokenizer.decode(token_ids)
        probabilities = None
        if choices is not None and last.choice_probabilities is not None and last.choice_index is not None:
            answer = choices[last.choice_index]
            probabilities = dict(zip(choices, last.choice_probabilities, strict=True))
        completion = CompletionOutput(0, answer, token_ids, str(last.finish_reason), probabilities)
        return RequestOutput(
            request.request_id, text, list(request.prompt_token_ids), [completion], last.num_cached_tokens
        )


def _is_one(prompts: Prompt | Sequence[Prompt]) -> TypeGuard[Prompt]:
    return isinstance(prompts, str | dict)


def _engine_config(options: Mapping[str, Any]) -> EngineConfig:
    known = EngineConfig.__dataclass_fields__
    for name in options:
        if name not in known:
            raise TypeError(f"LLM got an unknown option {name!r}; known: {', '.join(known)}")
    return EngineConfig(**options)


def _one_each(params: SamplingParams | Sequence[SamplingParams] | None, count_: int) -> Sequence[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams):
        return [params] * count_
    if len(params) != count_:
        raise InvalidRequestError(f"{len(params)} sampling_params for {count_} prompts: give one, or one each")
    return params
