"""What models write to call tools, parted from their texts. Formats: vLLM's tool parsers of these names."""

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence

from ...engine.text.call_tags import Tags
from ..streams.events import StreamEvent
from .events import CallDelta, CallEvent
from .written import Call, calls_of, decoded, decoded_all

TAGS = Tags("<tool_call>", "</tool_call>")
# As the grammar of forced calls has it.
_HEAD = re.compile(r'(?:\[|, )\{"name": ("(?:[^"\\]|\\.)*"), "parameters": *(?=\{)')


class NamedCallParser:
    """Of an answer that is one function's arguments and nothing else. As with OpenAI it ends with "stop"."""

    def __init__(self, key: str, name: str) -> None:
        self._key = key
        self._name = name
        self._has_begun = False

    def add(self, event: StreamEvent) -> CallEvent:
        if not event.text:
            return CallEvent.of(event, event.text)
        delta = CallDelta(0, event.text) if self._has_begun else CallDelta.first(self._key, 0, self._name, event.text)
        self._has_begun = True
        return CallEvent.of(event, "", [delta])


class RequiredCallParser:
    """Of an answer that is a list of calls, in the form that the grammar gives it; arguments are told as they come.

    What does not become a call stays text.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._num_calls = 0
        # Text of which it is not known yet what it is.
        self._held = ""
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def add(self, event: StreamEvent) -> CallEvent:
        self._held += event.text
        deltas = list(self._deltas())
        text = self._held if event.is_final and not self._num_calls else ""
        return CallEvent.of(event, text, deltas, "tool_calls" if self._num_calls else None)

    def _deltas(self) -> Iterator[CallDelta]:
        while self._held:
            if not self._depth:
                # After the arguments of the call before.
                head = _HEAD.match(self._held.removeprefix("}"))
                if head is None:
                    return
                rest = self._held.removeprefix("}")[head.end() :]
                arguments, self._held = self._cut(rest)
                yield CallDelta.first(self._key, self._num_calls, json.loads(head[1]), arguments)
                self._num_calls += 1
            else:
                arguments, self._held = self._cut(self._held)
                yield CallDelta(self._num_calls - 1, arguments)

    def _cut(self, text: str) -> tuple[str, str]:
        """Up to where the arguments end, if they do, and the rest."""
        for place, character in enumerate(text):
            if self._is_in_string:
                self._is_in_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character == '"':
                self._is_in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "]}":
                self._depth -= 1
                if not self._depth:
                    return text[: place + 1], text[place + 1 :]
        return text, ""


class WholeCallsParser:
    """Of an answer that is calls and nothing else, or text. `read` gives its calls and what follows the `most`.

    `may_be`: whether what is there may become calls.
    """

    def __init__(
        self,
        key: str,
        most: int | None,
        may_be: Callable[[str], bool],
        read: Callable[[str, int | None], tuple[Sequence[Call], str]],
    ) -> None:
        self._key = key
        self._most = most
        self._may_be = may_be
        self._read = read
        self._held = ""
        self._is_text = False

    def add(self, event: StreamEvent) -> CallEvent:
        if self._is_text:
            return CallEvent.of(event, event.text)
        self._held += event.text
        begin = self._held.lstrip()
        if event.is_final:
            calls, rest = self._read(begin, self._most)
            return _with_calls(event, rest if calls else self._held, calls, self._key)
        self._is_text = bool(begin) and not self._may_be(begin)
        return CallEvent.of(event, self._held if self._is_text else "")


def json_parser(key: str, most: int | None = None) -> WholeCallsParser:
    """Of calls as JSON, in a list or parted by semicolons: Llama 3's, Mistral's, Granite's."""

    def read(text: str, most: int | None) -> tuple[Sequence[Call], str]:
        values = decoded_all(text)
        calls = (calls_of(values) or ())[:most]
        rest = values[len(calls) :] if calls else []
        return calls, json.dumps(rest, ensure_ascii=False) if rest else ""

    return WholeCallsParser(key, most, lambda text: text[0] in "{[", read)


def named_json_parser(key: str, names: Sequence[str], most: int | None = None) -> WholeCallsParser:
    """Of names, each with its arguments as JSON behind it: the later Mistral's.

    The marks around the names are special tokens mostly, which no text has; numbers of calls are not.
    """
    longest = len("[TOOL_CALLS][CALL_ID]123456789[ARGS]") + max(map(len, names))
    head = rf"(?:\[TOOL_CALLS\])?({_any_of(names)})(?:\[CALL_ID\])?(?:[a-zA-Z0-9]{{9}})?(?:\[ARGS\])?\s*(?=\{{)"
    return _headed_parser(key, re.compile(head), longest, ("[TOOL_CALLS]", *names), most)


def harmony_parser(key: str, names: Sequence[str]) -> WholeCallsParser:
    """Of a message to a function: gpt-oss's, from behind the first word of its recipient on, or with that.

    The special tokens around the channel and the form are in no text. A message ends with its call.
    """
    marks = ("=functions.", "to=functions.")
    longest = len("to=functions. commentary json") + max(map(len, names))
    head = rf"(?:to)?=functions\.({_any_of(names)})\s*(?:commentary|analysis)?\s*(?:json)?\s*(?=\{{)"
    return _headed_parser(key, re.compile(head), longest, marks, most=1)


def _any_of(names: Sequence[str]) -> str:
    return "|".join(map(re.escape, sorted(names, key=len, reverse=True)))


def _headed_parser(
    key: str, head: re.Pattern[str], longest: int, marks: Sequence[str], most: int | None
) -> WholeCallsParser:
    """Of calls that begin with a `head` of up to so many characters, whose first group is the name.

    `marks`: what a head begins with.
    """

    def may_be(text: str) -> bool:
        if len(text) > longest:
            return head.match(text) is not None
        return any(text.startswith(mark) or mark.startswith(text) for mark in marks)

    def read(text: str, most: int | None) -> tuple[Sequence[Call], str]:
        calls: list[Call] = []
        while text and (most is None or len(calls) < most):
            if (found := head.match(text)) is None:
                break
            try:
                _, length = json.JSONDecoder().raw_decode(text[found.end() :])
            except (ValueError, RecursionError):
                break
            end = found.end() + length
            call = calls_of([{"name": found[1], "arguments": decoded(text[found.end() : end])}])
            if not call:
                break
            calls += call
            text = text[end:].lstrip()
        return calls, text

    return WholeCallsParser(key, most, may_be, read)


class TaggedCallsParser:
    """Of an answer with calls between `tags`, where `read` finds one, or several.

    What is between them and is no call stays text, as does what follows `most` calls, if only as JSON: nothing of an
    answer is lost. `needs_end`: by what stands before the closing marker it cannot be known to be complete.
    """

    def __init__(
        self,
        key: str,
        read: Callable[[str], Sequence[Call]],
        most: int | None = None,
        tags: Tags = TAGS,
        needs_end: bool = False,
    ) -> None:
        self._key = key
        self._tags = tags
        self._read = read
        self._needs_end = needs_end
        self._most = most
        self._num_calls = 0
        # Text of which it is not known yet what it is.
        self._held = ""

    def add(self, event: StreamEvent) -> CallEvent:
        self._held += event.text
        text: list[str] = []
        calls: list[Call] = []
        for piece, found in self._pieces(event.is_final):
            text.append(piece)
            calls += found
        first = self._num_calls
        self._num_calls += len(calls)
        return _with_calls(event, "".join(text), calls, self._key, first)

    def _pieces(self, is_final: bool) -> Iterator[tuple[str, Sequence[Call]]]:
        """What is known by now, each a text and the calls after it."""
        num_calls, tags = self._num_calls, self._tags
        while (begin := self._held.find(tags.begin)) >= 0:
            end = self._held.find(tags.end, begin)
            if end < 0 and not is_final:
                # What stands before it may be told; blanks in front of a call are none of the text's.
                before = self._held[:begin].rstrip()
                self._held = self._held[len(before) :]
                yield before, ()
                return
            # A model may end without the closing marker.
            after = len(self._held) if end < 0 else end + len(tags.end)
            inside = self._held[begin + len(tags.begin) : None if end < 0 else end]
            before, whole, self._held = self._held[:begin], self._held[:after], self._held[after:]
            is_none = num_calls == self._most or (end < 0 and self._needs_end)
            calls = () if is_none else self._read(inside)
            yield (before.rstrip(), calls[: self._left(num_calls)]) if calls else (whole, ())
            if rest := calls[self._left(num_calls) :]:
                yield json.dumps(rest, ensure_ascii=False), ()
            num_calls += len(calls) - len(rest)
        keep = 0 if is_final else _num_held(self._held, tags.begin)
        given, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        # Blanks after the last call are none of the text's either.
        yield "" if is_final and num_calls and not given.strip() else given, ()

    def _left(self, num_calls: int) -> int:
        """How many more are taken."""
        return sys.maxsize if self._most is None else self._most - num_calls


def _num_held(text: str, marker: str) -> int:
    """How many characters at the end of `text` may belong to a call: the beginning of its marker, blanks before it."""
    longest = min(len(marker) - 1, len(text))
    size = next((size for size in range(longest, 0, -1) if marker.startswith(text[-size:])), 0)
    before = text[: len(text) - size]
    return size + len(before) - len(before.rstrip())


def _with_calls(event: StreamEvent, text: str, calls: Sequence[Call], key: str, first: int = 0) -> CallEvent:
    deltas = [
        CallDelta.first(key, index, call["name"], json.dumps(call["arguments"], ensure_ascii=False))
        for index, call in enumerate(calls, first)
    ]
    return CallEvent.of(event, text, deltas, "tool_calls" if first + len(deltas) else None)
