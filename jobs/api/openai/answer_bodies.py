"""The bodies of answers, as OpenAI's clients read them. No HTTP in here: batches write the same bodies into files."""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import version
from typing import Any, Literal

from .logprobs import LogprobEntries, chat_logprobs, text_logprobs

CHAT_COMPLETION: Literal["chat.completion"] = "chat.completion"
TEXT_COMPLETION: Literal["text_completion"] = "text_completion"
_REQUEST_PREFIX = "req_"


@dataclass(frozen=True)
class Answer:
    """One choice, complete. `logprobs`: an entry a token (see `logprobs.LogprobEntries`) where they were asked for.

    `echo`: the prompt, where it is to stand in front; `prompt_logprobs`: likewise an entry for each token of it.
    `reasoning`: what the model thought before, where that is told. `tool_calls`: as a message
    has them. `stop_reason`: the text or token that stopped it, as vLLM's server tells.
    """

    text: str
    finish_reason: str
    logprobs: LogprobEntries | None = None
    echo: str = ""
    prompt_logprobs: LogprobEntries | None = None
    reasoning: str | None = None
    tool_calls: Sequence[Mapping[str, Any]] = ()
    stop_reason: str | int | None = None

    @classmethod
    def of_prompt(cls, echo: str, prompt_logprobs: LogprobEntries | None) -> "Answer":
        """The prompt alone, where no answer to it was wanted."""
        return cls("", "length", None if prompt_logprobs is None else (), echo, prompt_logprobs)


@dataclass(frozen=True)
class Usage:
    """The tokens of all prompts, each counted once, and of all answers."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.completion_tokens + other.completion_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            # Programs read it without a look at whether it is there.
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
        }


@dataclass(frozen=True)
class Head:
    """What says which answer this is. `model`: as the client named it. `created`: Unix seconds."""

    id: str
    model: str
    system_fingerprint: str
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def chat(cls, request_id: str, model: str, exact_model: str) -> "Head":
        return cls(f"chatcmpl-{request_id.removeprefix(_REQUEST_PREFIX)}", model, system_fingerprint(exact_model))

    @classmethod
    def text(cls, request_id: str, model: str, exact_model: str) -> "Head":
        return cls(f"cmpl-{request_id.removeprefix(_REQUEST_PREFIX)}", model, system_fingerprint(exact_model))

    @classmethod
    def response(cls, request_id: str, model: str, exact_model: str) -> "Head":
        return cls(f"resp_{request_id.removeprefix(_REQUEST_PREFIX)}", model, system_fingerprint(exact_model))

    def body(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


# Reading our version takes milliseconds, on the event loop; models are few.
@lru_cache(maxsize=64)
def system_fingerprint(exact_model: str) -> str:
    """The same while model and engine are: with it a seed gives the same answer."""
    digest = hashlib.sha256(f"{exact_model}|{version('headrace')}".encode()).hexdigest()
    return f"fp_{digest[:10]}"


def chat_completion(head: Head, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
    """A `ChatCompletion` of the choices in their order."""
    choices = [_chat_choice(index, answer) for index, answer in enumerate(answers)]
    return {**head.body(CHAT_COMPLETION), "choices": choices, "usage": usage.body()}


def text_completion(head: Head, answers: Sequence[Answer], usage: Usage) -> dict[str, Any]:
    """A `Completion` of the choices in their order: those of the first prompt, then those of the second, …"""
    choices = [_text_choice(index, answer) for index, answer in enumerate(answers)]
    return {**head.body(TEXT_COMPLETION), "choices": choices, "usage": usage.body()}


def _chat_choice(index: int, answer: Answer) -> Mapping[str, Any]:
    text = answer.echo + answer.text
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
    if answer.reasoning is not None:
        message |= reasoning_fields(answer.reasoning)
    if answer.tool_calls:
        message |= {"content": text or None, "tool_calls": answer.tool_calls}
    return {
        "index": index,
        "message": message,
        "logprobs": None if answer.logprobs is None else chat_logprobs(answer.logprobs),
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }


def reasoning_fields(text: str) -> dict[str, str]:
    """Under the name that vLLM has by now, and the one before, which DeepSeek's, SGLang's and many clients read."""
    return {"reasoning": text, "reasoning_content": text}


def _text_choice(index: int, answer: Answer) -> Mapping[str, Any]:
    return {
        "index": index,
        "text": answer.echo + answer.text,
        "logprobs": _text_logprobs(answer),
        "finish_reason": answer.finish_reason,
        "stop_reason": answer.stop_reason,
    }


def _text_logprobs(answer: Answer) -> Mapping[str, list[Any]] | None:
    if answer.logprobs is None:
        return None
    own = text_logprobs(answer.logprobs, len(answer.echo))
    before = text_logprobs(answer.prompt_logprobs or (), 0)
    return {name: before[name] + own[name] for name in own}
