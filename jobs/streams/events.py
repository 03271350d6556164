"""What a reader of a token stream gets, and how it stands in Redis."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class StreamUsage:
    """How many tokens an answer took; `cached_tokens` are those of the prompt that the prefix cache had."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int

    def to_json(self) -> str:
        return (
            f'{{"prompt_tokens":{self.prompt_tokens},"cached_tokens":{self.cached_tokens},'
            f'"completion_tokens":{self.completion_tokens}}}'
        )


@dataclass(frozen=True, slots=True)
class StreamError:
    """Why an answer has no proper end: a word for programs and a line for people."""

    code: str
    message: str

    def to_json(self) -> str:
        return json.dumps({"code": self.code, "message": self.message})


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """How a stream ends: with the text that is still owed, and after what it took, if that is known.

    `error`: why it has no proper end, where `finish_reason` is "error". `stop_reason`: as vLLM has it.
    """

    finish_reason: str
    text: str = ""
    usage: StreamUsage | None = None
    error: StreamError | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """The next tokens of an answer, or its end.

    `first` is the number of the first token, counted from 1, and `texts` what each token added. `text` is all that
    the event adds: the texts of all events of a stream give the stored output. `logprobs` has an item a token
    where they were asked for, and `prompt_logprobs` an item a token of the prompt, beside the first token of a request
    (of its first sample). The end has a `finish_reason` ("error" with `error`), `usage`, perhaps a `stop_reason`, as
    vLLM has it, and no tokens.
    """

    first: int
    token_ids: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    logprobs: tuple[Any, ...] | None = None
    finish_reason: str | None = None
    text: str = ""
    usage: StreamUsage | None = None
    error: StreamError | None = None
    prompt_logprobs: tuple[Any, ...] | None = None
    stop_reason: str | int | None = None

    @property
    def last(self) -> int:
        """The number of the last token so far; what to resume `after`."""
        return self.first + len(self.token_ids) - 1

    @property
    def is_final(self) -> bool:
        """Whether the stream ends here."""
        return self.finish_reason is not None

    def after(self, number: int) -> "StreamEvent | None":
        """What of it comes after the token `number`; None when nothing does. An end always does."""
        if number < self.first or self.is_final:
            return self
        if number >= self.last:
            return None
        skip = number - self.first + 1
        texts = self.texts[skip:]
        logprobs = None if self.logprobs is None else self.logprobs[skip:]
        return replace(
            self,
            first=number + 1,
            token_ids=self.token_ids[skip:],
            texts=texts,
            logprobs=logprobs,
            text="".join(texts),
            prompt_logprobs=None,
        )

    @classmethod
    def from_entry(cls, entry_id: str, fields: Mapping[str, str]) -> Self:
        """An entry of the Redis Stream: each field is JSON but `first`, `finish_reason` and `text`."""
        if "finish_reason" not in fields:
            logprobs, of_prompt = fields.get("logprobs"), fields.get("prompt_logprobs")
            return cls._tokens(
                int(fields["first"]),
                json.loads(fields["tokens"]),
                json.loads(fields["texts"]),
                None if logprobs is None else json.loads(logprobs),
                None if of_prompt is None else json.loads(of_prompt),
            )
        usage, error, stopped = fields.get("usage"), fields.get("error"), fields.get("stop_reason")
        return cls._end(
            entry_id,
            fields["finish_reason"],
            fields["text"],
            None if usage is None else json.loads(usage),
            None if error is None else json.loads(error),
            None if stopped is None else json.loads(stopped),
        )

    @classmethod
    def from_frame(cls, entry_id: str, fields: Mapping[str, Any]) -> Self:
        """An item of a frame: the fields of the entry as one JSON object."""
        if "finish_reason" not in fields:
            logprobs, of_prompt = fields.get("logprobs"), fields.get("prompt_logprobs")
            return cls._tokens(fields["first"], fields["tokens"], fields["texts"], logprobs, of_prompt)
        further = (fields.get(name) for name in ("usage", "error", "stop_reason"))
        return cls._end(entry_id, fields["finish_reason"], fields["text"], *further)

    @classmethod
    def _tokens(
        cls,
        first: int,
        token_ids: list[int],
        texts: list[str],
        logprobs: list[Any] | None,
        prompt_logprobs: list[Any] | None,
    ) -> Self:
        kept = None if logprobs is None else tuple(logprobs)
        of_prompt = None if prompt_logprobs is None else tuple(prompt_logprobs)
        return cls(first, tuple(token_ids), tuple(texts), kept, None, "".join(texts), prompt_logprobs=of_prompt)

    @classmethod
    def _end(
        cls,
        entry_id: str,
        finish_reason: str,
        text: str,
        usage: Mapping[str, int] | None,
        error: Mapping[str, str] | None,
        stop_reason: str | int | None,
    ) -> Self:
        return cls(
            int(entry_id.partition("-")[0]) + 1,
            finish_reason=finish_reason,
            text=text,
            usage=None if usage is None else StreamUsage(**usage),
            error=None if error is None else StreamError(**error),
            stop_reason=stop_reason,
        )


@dataclass(frozen=True)
class ThoughtEvent(StreamEvent):
    """An event whose `text` and `logprobs` are those of what is said alone. `reasoning`: what is thought in it."""

    reasoning: str = ""


@dataclass(frozen=True)
class RecoveredStream:
    """What earlier attempts have written of a stream: the next one goes on after it. `end` is set when it has ended."""

    token_ids: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    logprobs: tuple[Any, ...] | None = None
    prompt_logprobs: tuple[Any, ...] | None = None
    end: StreamEvent | None = None

    @property
    def last(self) -> int:
        """The number of the last token."""
        return len(self.token_ids)
