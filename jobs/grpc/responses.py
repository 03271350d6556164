"""A stream's events as gRPC's messages."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..streams.events import StreamEvent
from .headrace_pb2 import End, GenerateResponse, TokenLogprob, Tokens, Usage


def response_of(stream_id: str, choice: int, event: StreamEvent) -> GenerateResponse:
    """The end of an answer that failed is none of these: it is the status of the call."""
    if event.is_final:
        return GenerateResponse(id=stream_id, choice=choice, end=_end(event))
    return GenerateResponse(id=stream_id, choice=choice, tokens=_tokens(event))


def _tokens(event: StreamEvent) -> Tokens:
    return Tokens(
        first=event.first,
        token_ids=event.token_ids,
        texts=event.texts,
        text=event.text,
        logprobs=[_logprob(entry) for entry in event.logprobs or ()],
    )


def _end(event: StreamEvent) -> End:
    usage = None if event.usage is None else Usage(**asdict(event.usage))
    end = End(num_tokens=event.last, finish_reason=event.finish_reason, text=event.text, usage=usage)
    if isinstance(event.stop_reason, str):
        end.stop_text = event.stop_reason
    elif event.stop_reason is not None:
        end.stop_token_id = event.stop_reason
    return end


def _logprob(entry: Mapping[str, Any]) -> TokenLogprob:
    return TokenLogprob(
        token=entry["token"],
        token_id=entry["token_id"],
        logprob=entry["logprob"],
        top=[_logprob(other) for other in entry.get("top", ())],
    )
