"""Ask one thing and get the answer, at once or as it comes: what `Client` offers of live requests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...engine.checkpoints.hub import locate_model
from ...engine.errors import InvalidRequestError, shown
from ...engine.lora_request import LoRARequest
from ..broker.celery_app import live_queue
from ..errors import JobError
from ..spec.lora import as_fields
from ..spec.schemas import JobSpec
from ..streams.events import StreamEvent, StreamUsage
from ..streams.reader import StreamTimeout, afollow, follow
from .prompt import LivePrompt, LivePrompts
from .requests import DEFAULT_TIMEOUT_SECONDS, LiveRequest, LiveRequests, LiveState, UnknownRequest, new_seed

OnWait = Callable[[], None] | None
Messages = Sequence[Mapping[str, Any]]
# How long nothing may come before a reader asks whether the request is still known.
_PATIENCE_SECONDS = 1.0
# At each so manieth look it is tried whether Redis takes anything in: that writes, and thousands may wait.
_LOOKS_PER_TRY = 10
# So many tries in a row it has to refuse: a failover takes less than there is between them.
_MAX_REFUSALS = 2


class GenerationError(JobError):
    """A request that ended without a proper answer. `code` is a word for programs."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{message} ({code})")
        self.code = code


@dataclass(frozen=True)
class GeneratedText:
    """One answer. `logprobs`: an item a token where they were asked for, as a job's column `logprobs` has them.

    `prompt_logprobs`: those of the prompt, where they were asked for; the first answer has them. `stop_reason`: which
    of the request's stops ended it, a text or a token id, if one did.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: StreamUsage
    logprobs: tuple[Any, ...] | None = None
    prompt_logprobs: tuple[Any, ...] | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class Generated:
    """A prompt's answers, one for each of its `n` samples. `text` is the first one's."""

    request_id: str
    outputs: tuple[GeneratedText, ...]

    @property
    def text(self) -> str:
        return self.outputs[0].text


def new_request(
    prompt: str | Messages,
    model: str | Path,
    *,
    system: str | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    **options: Any,
) -> LiveRequest:
    """Describe a request: a text is put to a chat model as the user's message, to another as it is.

    `options`: those of `live_spec`. Raises what that does.
    """
    return request_of(live_spec(model, **options), prompt, system, timeout_seconds)


def live_spec(
    model: str | Path,
    *,
    choices: Sequence[str | int] | None = None,
    dtype: str = "auto",
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    revision: str | None = None,
    lora_request: LoRARequest | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> JobSpec:
    """How a request is to be answered, and by which workers: as a job of it would be.

    Raises `SpecError`, `ConfigError` or `InvalidRequestError` naming the field at fault, `ModelError`.
    """
    spec = JobSpec.parse(
        model=locate_model(model, revision, with_weights=False).name,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        choices=choices,
        sampling={"seed": new_seed(), **sampling},
        chat_template_kwargs=chat_template_kwargs,
        lora=as_fields(lora_request),
    )
    spec.precision.check()
    if spec.lora is not None:
        spec.lora.check()
    return spec


def request_of(spec: JobSpec, prompt: str | Messages, system: str | None, timeout_seconds: float) -> LiveRequest:
    """See `new_request`."""
    prompts = LivePrompts.of(spec.model)
    told = prompts.tokenizer.template_kwargs(spec.chat_template_kwargs or {}, spec.sampling.reasoning)
    read = _read(prompts, prompt, system, told)
    prompts.check(read.token_ids, spec.sampling, "prompt")
    return LiveRequest.new(
        queue=live_queue(spec.model, spec.precision),
        model=spec.model,
        prompt_token_ids=read.token_ids,
        images=read.images,
        sampling=spec.sampling,
        choices=spec.choices,
        lora=spec.lora,
        timeout_seconds=timeout_seconds,
    )


def _read(
    prompts: LivePrompts, prompt: str | Messages, system: str | None, template_kwargs: Mapping[str, Any]
) -> LivePrompt:
    opening = [{"role": "system", "content": system}] if system else []
    if not isinstance(prompt, str | Iterable):
        # A table has NaN where a text lacks.
        raise InvalidRequestError(f"prompt must be a text or a list of messages, not {shown(prompt)}", "prompt")
    if not isinstance(prompt, str):
        return prompts.chat([*opening, *prompt], template_kwargs)
    if prompts.tokenizer.has_chat_template:
        return prompts.chat([*opening, {"role": "user", "content": prompt}], template_kwargs)
    return LivePrompt(prompts.text(f"{system}\n\n{prompt}" if system else prompt))


@dataclass(frozen=True)
class LiveStreams:
    """Follows the answers to requests. Thread-safe."""

    redis_url: str
    requests: LiveRequests

    def follow(self, stream_id: str, after: int = 0, on_wait: OnWait = None) -> Iterator[StreamEvent]:
        """Yield what comes after the token `after`, up to and including the end.

        `on_wait` is called now and then while nothing comes.
        Raises `UnknownRequest` when there is no such request (any more), and `GenerationError`: `deadline_exceeded`
        when its deadline has passed without an end, `stream_lost` when it has ended but Redis has lost its end,
        `unavailable` when Redis takes nothing in. All of them also after a while of waiting.
        """
        silence = _Silence(self.requests, stream_id)
        while True:
            try:
                for event in follow(self.redis_url, stream_id, after, timeout=_PATIENCE_SECONDS):
                    silence.end()
                    yield event
                    after = event.last
                return
            except StreamTimeout as timeout:
                silence.look(timeout.has_looked)
            if on_wait is not None:
                on_wait()

    async def afollow(self, stream_id: str, after: int = 0) -> AsyncIterator[StreamEvent]:
        """As `follow`, for asyncio."""
        silence = await asyncio.to_thread(_Silence, self.requests, stream_id)
        while True:
            try:
                async for event in afollow(self.redis_url, stream_id, after, timeout=_PATIENCE_SECONDS):
                    silence.end()
                    yield event
                    after = event.last
                return
            except StreamTimeout as timeout:
                await asyncio.to_thread(silence.look, timeout.has_looked)

    def collect(self, request: LiveRequest, on_wait: OnWait = None) -> Generated:
        """Wait for the whole answer. Raises `GenerationError` when there is none.

        Should Redis have forgotten the request, it is submitted again: the answer is the same.
        """

        if on_wait is not None:
            on_wait()
        return Generated(
            request.id, tuple(self._collect_one(request, stream_id, on_wait) for stream_id in request.stream_ids)
        )

    def _collect_one(self, request: LiveRequest, stream_id: str, on_wait: OnWait) -> GeneratedText:
        events: list[StreamEvent] = []
        while not events or not events[-1].is_final:
            try:
                # Not `+=`: what came before an error is to be kept.
                for event in self.follow(stream_id, events[-1].last if events else 0, on_wait):
                    events.append(event)  # noqa: PERF402
            except UnknownRequest:
                self.requests.submit(request)
        return _generated(events)


class _Silence:
    """What is known of a request whose stream brings nothing. Raises `UnknownRequest`, and redis' errors."""

    def __init__(self, requests: LiveRequests, stream_id: str) -> None:
        self._requests = requests
        self._request_id = stream_id.partition("/")[0]
        self._has_ended = requests.get(self._request_id).state is LiveState.ENDED
        self._num_looks = self._num_refusals = 0

    def end(self) -> None:
        """Something has come."""
        self._num_looks = self._num_refusals = 0

    def look(self, has_looked: bool) -> None:
        """Find out whether something may still come. Raises `GenerationError` when nothing more is to be waited for.

        has_looked: see `StreamTimeout`.
        """
        record = self._requests.get(self._request_id)
        # Once more after it has ended: the end may have come meanwhile. And a Redis that was killed may know less.
        had_ended, self._has_ended = self._has_ended, record.state is LiveState.ENDED
        if had_ended and self._has_ended and has_looked:
            raise GenerationError("stream_lost", f"Redis has lost the answer to {self._request_id}: ask again")
        if not self._has_ended and record.request.is_overdue:
            raise GenerationError("deadline_exceeded", f"request {self._request_id} was not answered in time")
        self._num_looks += 1
        if self._num_looks % _LOOKS_PER_TRY == 0:
            self._expect_writes()

    def _expect_writes(self) -> None:
        self._num_refusals = 0 if self._requests.accept_writes() else self._num_refusals + 1
        if self._num_refusals >= _MAX_REFUSALS:
            raise GenerationError("unavailable", "Redis takes nothing in, its disk or memory may be full: ask again")


def _generated(events: Sequence[StreamEvent]) -> GeneratedText:
    end = events[-1]
    if end.error is not None:
        raise GenerationError(end.error.code, end.error.message)
    assert end.finish_reason is not None
    assert end.usage is not None
    has_logprobs = any(event.logprobs is not None for event in events)
    return GeneratedText(
        text="".join(event.text for event in events),
        token_ids=tuple(token for event in events for token in event.token_ids),
        finish_reason=end.finish_reason,
        usage=end.usage,
        logprobs=tuple(item for event in events for item in event.logprobs or ()) if has_logprobs else None,
        prompt_logprobs=events[0].prompt_logprobs,
        stop_reason=end.stop_reason,
    )
