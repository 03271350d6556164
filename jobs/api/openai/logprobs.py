"""Log-probabilities of tokens in the two shapes of OpenAI's API."""

from collections.abc import Mapping, Sequence
from typing import Any

# One a token, as `row_answers` and the live worker write them: {"token": its text, "token_id", "logprob",
# "top": the likeliest in its place, their like}. The first token of a prompt has no logprob (None).
LogprobEntries = Sequence[Mapping[str, Any]]

# What OpenAI says for minus infinity, for which JSON has no word.
_LEAST_LOGPROB = -9999.0
_REPLACEMENT = "\ufffd"


def chat_logprobs(entries: LogprobEntries) -> dict[str, Any]:
    """A chat choice's `logprobs`."""
    content = [{**_chat_token(entry), "top_logprobs": [_chat_token(top) for top in entry["top"]]} for entry in entries]
    return {"content": content, "refusal": None}


def text_logprobs(entries: LogprobEntries, offset: int) -> dict[str, list[Any]]:
    """A plain completion's `logprobs`; the first token begins at the character `offset` of the choice's text."""
    offsets = []
    for entry in entries:
        offsets.append(offset)
        offset += len(entry["token"])
    return {
        "tokens": [entry["token"] for entry in entries],
        "token_logprobs": [None if entry["logprob"] is None else _logprob(entry) for entry in entries],
        "top_logprobs": [None if entry["logprob"] is None else _top_logprobs(entry) for entry in entries],
        "text_offset": offsets,
    }


def _top_logprobs(entry: Mapping[str, Any]) -> dict[str, float]:
    """The token's own and the likeliest; of tokens with the same text the likelier's counts."""
    found: dict[str, float] = {}
    for each in (entry, *entry["top"]):
        found[each["token"]] = max(_logprob(each), found.get(each["token"], _LEAST_LOGPROB))
    return found


def _chat_token(entry: Mapping[str, Any]) -> dict[str, Any]:
    text = entry["token"]
    # Of a token that is part of a character the text does not tell the bytes.
    known = None if _REPLACEMENT in text else list(text.encode())
    return {"token": text, "logprob": _logprob(entry), "bytes": known}


def _logprob(entry: Mapping[str, Any]) -> float:
    return max(float(entry["logprob"]), _LEAST_LOGPROB)
