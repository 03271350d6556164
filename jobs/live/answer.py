"""A live request that is being answered: its requests to the engine, and what they bring as streams."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from ...engine.checkpoints.hub import public_name
from ...engine.request import FinishReason, Request, RequestEvent
from ...engine.text.detokenizer import StopStrings
from ...engine.text.text_fields import text_fields
from ...engine.text.tokenizer import Tokenizer
from ...engine.vision.reading import ImageReader
from ..hosting.answer_values import logprob_entries, prompt_logprob_entries, stop_reason_of, text_of
from ..hosting.cache_salts import cache_salt
from ..hosting.outcomes import Answer
from ..streams.events import RecoveredStream, StreamEnd, StreamError, StreamUsage
from ..streams.publisher import StreamPublisher
from .claims import LiveClaim
from .requests import LiveRequest
from .text import GrowingText

# Interactive requests go before bulk rows, whose priority is 0.
PRIORITY = -1


@dataclass
class LiveSample:
    """One of a request's answers, as it grows: the engine's events in, a stream out. Used by one thread."""

    stream_id: str
    attempt: int
    request: Request
    tokenizer: Tokenizer
    publisher: StreamPublisher
    text: GrowingText
    token_ids: list[int]
    num_cached_tokens: int = 0
    _last: RequestEvent | None = None

    def add(self, event: RequestEvent) -> None:
        """Stream an event's tokens; those that come with the answer's end wait for it, as it decides on their text."""
        self.num_cached_tokens = event.num_cached_tokens
        if event.finish_reason is not None:
            self._last = event
            return
        self._append(event, [self.text.add(token) for token in event.new_token_ids])

    def end(self, answer: Answer) -> None:
        """End the stream as the engine has ended the answer."""
        self.num_cached_tokens = answer.num_cached_tokens
        whole, owed = text_of(self.tokenizer, self.request, answer), ""
        if self._last is None:
            owed = self.text.owed(whole)
        else:
            self._append(self._last, self._last_texts(self._last, whole))
        stopped = stop_reason_of(self.tokenizer, self.request, answer)
        self._finish(str(answer.finish_reason), owed, stop_reason=stopped)

    def fail(self, error: StreamError) -> None:
        """End the stream with an error after what is there."""
        self._finish(str(FinishReason.ERROR), self.text.held, error)

    def abort(self) -> None:
        """End the stream because nobody wants the rest."""
        self._finish(str(FinishReason.ABORT), self.text.held)

    def _last_texts(self, event: RequestEvent, whole: str) -> list[str]:
        *others, last = event.new_token_ids
        # A choice comes whole, and its tokens by themselves need not spell it as it was given.
        is_choice = event.choice_index is not None
        texts = ["" if is_choice and not self.text.is_thinking else self.text.add(token) for token in others]
        if self.text.is_thinking and event.finish_reason is not FinishReason.STOP:
            return [*texts, self.text.add(last)]
        return [*texts, self.text.owed(whole)]

    def _append(self, event: RequestEvent, texts: list[str]) -> None:
        num_top, logprobs = self.request.params.logprobs, None
        if num_top is not None:
            logprobs = logprob_entries(self.tokenizer, event.new_token_ids, event.logprobs, num_top)
        of_prompt = None
        if event.prompt_logprobs is not None:
            of_prompt = prompt_logprob_entries(self.tokenizer, self.request, event.prompt_logprobs)
        self.token_ids += event.new_token_ids
        self.publisher.append(self.stream_id, event.new_token_ids, texts, logprobs, of_prompt, self.attempt)

    def _finish(
        self, reason: str, text: str, error: StreamError | None = None, stop_reason: str | int | None = None
    ) -> None:
        usage = StreamUsage(
            prompt_tokens=len(self.request.prompt_token_ids),
            # A later attempt may find tokens of the answer cached too.
            cached_tokens=min(self.num_cached_tokens, len(self.request.prompt_token_ids)),
            completion_tokens=len(self.token_ids),
        )
        self.publisher.finish(self.stream_id, StreamEnd(reason, text, usage, error, stop_reason), self.attempt)

    def release(self) -> None:
        """Leave the stream to another attempt."""
        self.publisher.release(self.stream_id, self.attempt)


class Interruption(Enum):
    """Why an attempt ends before the engine has ended the answer."""

    CANCELLED = auto()
    DEADLINE = auto()
    LOST = auto()
    HANDED_BACK = auto()


@dataclass(eq=False)
class LiveAnswer:
    """A claimed request. `samples`: those of its answers that have not ended, by their ids in the engine.

    `is_open`: its streams are begun; `interrupted`: what happened before. `has_begun`: the engine has it;
    `is_known_to_wait`: Redis was told that it has not. `is_over`: nothing more is to come of this attempt. `is_lost`:
    another one has taken over.
    """

    claim: LiveClaim
    deadline: float
    samples: dict[str, LiveSample] = field(default_factory=dict)
    is_open: bool = False
    interrupted: Interruption | None = None
    has_begun: bool = False
    is_known_to_wait: bool = False
    is_over: bool = False
    is_lost: bool = False

    @property
    def id(self) -> str:
        return self.claim.request.id

    @property
    def requests(self) -> list[Request]:
        return [sample.request for sample in self.samples.values()]

    def open(self, tokenizer: Tokenizer, publisher: StreamPublisher, recovered: Mapping[str, RecoveredStream]) -> None:
        """Make the samples that earlier attempts have not ended, each going on where its stream stands."""
        asked, attempt = self.claim.request, self.claim.attempt
        plain = _plain_request(tokenizer, asked)
        leader: str | None = None
        for index, stream_id in enumerate(asked.stream_ids):
            known = recovered.get(stream_id, RecoveredStream())
            if known.end is not None:
                continue
            request = replace(
                plain,
                # Another attempt's may still be in the engine, about to be dropped.
                request_id=f"{stream_id}#{attempt}",
                params=plain.params.of_sample(index),
                stop_checker=StopStrings.of(tokenizer, plain.params, asked.prompt_token_ids),
                fork_of=leader,
                resume_token_ids=known.token_ids,
            )
            leader = leader or request.request_id
            text = GrowingText.of(tokenizer, request)
            text.resume(known.token_ids, known.texts)
            publisher.open(stream_id, attempt, asked.reply_to, known)
            self.samples[request.request_id] = LiveSample(
                stream_id, attempt, request, tokenizer, publisher, text, list(known.token_ids)
            )

    def refuse(self, publisher: StreamPublisher, recovered: Mapping[str, RecoveredStream], error: StreamError) -> None:
        """End all streams that have no end yet, where the samples cannot be made."""
        self.samples.clear()
        for stream_id in self.claim.request.stream_ids:
            known = recovered.get(stream_id, RecoveredStream())
            if known.end is None:
                publisher.open(stream_id, self.claim.attempt, self.claim.request.reply_to, known)
                publisher.finish(stream_id, StreamEnd(str(FinishReason.ERROR), error=error), self.claim.attempt)


def _plain_request(tokenizer: Tokenizer, asked: LiveRequest) -> Request:
    """What is the same in the engine's requests for all samples. Raises `InvalidRequestError`."""
    params = asked.sampling.params(asked.choices)
    files = asked.image_files
    images = ImageReader.of_model(tokenizer.folder, public_name(asked.model)).images(files) if files else ()
    return Request(
        asked.id,
        asked.prompt_token_ids,
        params,
        priority=PRIORITY,
        lora_request=None if asked.lora is None else asked.lora.request(),
        images=images,
        cache_salt=cache_salt(asked.tenant),
        is_conversation=True,
        **text_fields(tokenizer, params),
    )
