"""A stream as its publisher keeps it: all tokens of the answer so far, and which of them Redis has."""

import json
from collections.abc import Iterable, Sequence
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

from .events import RecoveredStream, StreamEnd, StreamError
from .keys import checked

# How many arguments each operation of the script takes.
_NUM_ARGUMENTS = {"claim": 6, "tokens": 9, "first": 10, "end": 10, "renew": 4}
_DECODER = json.JSONDecoder()


class Operation(NamedTuple):
    """Arguments of the script as the Redis protocol has them, ready to be sent."""

    num_arguments: int
    data: bytes


class OutgoingStream:
    """Belongs to one thread. Tokens are kept as JSON without brackets, a comma after each: some 15 bytes a token."""

    def __init__(self, stream_id: str, attempt: int, reply_to: str | None, recovered: RecoveredStream | None) -> None:
        self.stream_id = stream_id
        self.attempt = attempt
        self.num_tokens = 0
        # The stream's last token in Redis; may lie ahead of ours when an earlier attempt came further.
        self.num_sent = 0
        self.end_sent = False
        self.needs_claim = True
        self.released = False
        self.is_given_up = False
        self.renewed_at = 0.0
        self._tokens, self._texts, self._logprobs = bytearray(), bytearray(), bytearray()
        # As an argument; the entry of the first token has it.
        self._prompt_logprobs: bytes | None = None
        self._num_sent_bytes = (0, 0, 0)
        self._end: bytes | None = None
        names = (checked(stream_id), str(attempt), checked(reply_to) if reply_to else "")
        who = b"".join(_argument(name.encode()) for name in names)
        self._heads = {kind: _argument(kind.encode()) + who for kind in _NUM_ARGUMENTS}
        if recovered is not None:
            self.append(recovered.token_ids, recovered.texts, recovered.logprobs, recovered.prompt_logprobs)
            self.seek(recovered.last)

    @property
    def has_end(self) -> bool:
        return self._end is not None

    @property
    def is_closed(self) -> bool:
        """Whether nothing more may come: it has its end, or is left to another attempt."""
        return self.has_end or self.released

    @property
    def num_waiting_bytes(self) -> int:
        """How much of its tokens Redis lacks."""
        of_prompt = b"" if self.num_sent else self._prompt_logprobs or b""
        return sum(self._num_bytes()) - sum(self._num_sent_bytes) + len(of_prompt)

    def append(
        self,
        token_ids: Sequence[int],
        texts: Sequence[str],
        logprobs: Sequence[Any] | None,
        prompt_logprobs: Sequence[Any] | None = None,
    ) -> None:
        """Keep further tokens."""
        if not token_ids:
            return
        assert not self.num_tokens or (logprobs is not None) == bool(self._logprobs), "logprobs of some tokens only"
        was_ahead = self.num_sent > self.num_tokens
        self._tokens += _items(map(str, token_ids))
        self._texts += _items(map(encode_basestring_ascii, texts))
        if logprobs is not None:
            self._logprobs += _items(map(_compact_json, logprobs))
        if prompt_logprobs is not None:
            self._prompt_logprobs = _argument(_compact_json(prompt_logprobs).encode("ascii"))
        self.num_tokens += len(token_ids)
        if was_ahead:
            self.seek(self.num_sent)

    def finish(self, end: StreamEnd) -> None:
        """Keep the end."""
        usage, error = end.usage.to_json() if end.usage else "", end.error.to_json() if end.error else ""
        stopped = "" if end.stop_reason is None else json.dumps(end.stop_reason)
        fields = (end.finish_reason, end.text, usage, error, stopped)
        # Decoded text has no lone surrogates; one that has some all the same must not stop the thread.
        self._end = b"".join(_argument(field.encode(errors="replace")) for field in fields)

    def give_up(self, error: StreamError) -> None:
        """Let go of the tokens: the stream is to end with the error after those that Redis has."""
        self.finish(StreamEnd("error", error=error))
        self._tokens, self._texts, self._logprobs = bytearray(), bytearray(), bytearray()
        self._prompt_logprobs = None
        self.is_given_up = True
        self.seek(self.num_sent)

    def seek(self, num_sent: int) -> None:
        """Note that Redis has the first `num_sent` tokens and no end."""
        self.num_sent, self.end_sent = num_sent, False
        if self.is_given_up:
            self.num_tokens = num_sent
        if num_sent >= self.num_tokens:
            self._num_sent_bytes = self._num_bytes()
        else:
            tokens, texts, logprobs = self._tokens, self._texts, self._logprobs
            self._num_sent_bytes = (_end_of(tokens, num_sent), _end_of(texts, num_sent), _end_of(logprobs, num_sent))

    def operations(self) -> list[Operation]:
        """What Redis is to do, in this order, so that it has everything."""
        wanted = []
        if self.needs_claim:
            wanted.append(self._claim())
        if self.num_tokens > self.num_sent:
            wanted.append(self._append())
        if self._end is not None and not self.end_sent:
            # An earlier attempt may have come further than this answer goes: what was read can not be taken back.
            last = _argument(b"%d" % max(self.num_tokens, self.num_sent))
            wanted.append(self._operation("end", last + self._end))
        return wanted

    def renewal(self) -> Operation:
        """Gives the stream's keys their TTL anew."""
        return self._operation("renew", b"")

    def sent(self) -> None:
        """Note that Redis has done all `operations`."""
        self.needs_claim = False
        self.end_sent = self.has_end
        if self.num_tokens > self.num_sent:
            self.num_sent = self.num_tokens
            self._num_sent_bytes = self._num_bytes()

    def _claim(self) -> Operation:
        ended = b"1" if self.end_sent else b"0"
        return self._operation("claim", _argument(b"%d" % self.num_sent) + _argument(ended))

    def _append(self) -> Operation:
        first, last = b"%d" % (self.num_sent + 1), b"%d" % self.num_tokens
        of_tokens, of_texts, of_logprobs = self._num_sent_bytes
        tokens, texts = bytes(self._tokens[of_tokens:-1]), bytes(self._texts[of_texts:-1])
        logprobs = b"[%b]" % bytes(self._logprobs[of_logprobs:-1]) if self._logprobs else b""
        # One formatting, not five: this runs for every stream at every step.
        data = b"$%d\r\n%b\r\n$%d\r\n%b\r\n$%d\r\n[%b]\r\n$%d\r\n[%b]\r\n$%d\r\n%b\r\n" % (
            len(first),
            first,
            len(last),
            last,
            len(tokens) + 2,
            tokens,
            len(texts) + 2,
            texts,
            len(logprobs),
            logprobs,
        )
        if not self.num_sent and self._prompt_logprobs is not None:
            return self._operation("first", data + self._prompt_logprobs)
        return self._operation("tokens", data)

    def _operation(self, kind: str, data: bytes) -> Operation:
        return Operation(_NUM_ARGUMENTS[kind], self._heads[kind] + data)

    def _num_bytes(self) -> tuple[int, int, int]:
        return len(self._tokens), len(self._texts), len(self._logprobs)


def _argument(value: bytes) -> bytes:
    return b"$%d\r\n%b\r\n" % (len(value), value)


def _items(values: Iterable[str]) -> bytes:
    return (",".join(values) + ",").encode("ascii")


def _compact_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _end_of(buffer: bytearray, num_items: int) -> int:
    """Where the first `num_items` items end."""
    text, end = buffer.decode("ascii"), 0
    while text and num_items:
        end = _DECODER.raw_decode(text, end)[1] + 1
        num_items -= 1
    return end
