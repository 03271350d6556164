"""The lines of a batch's input file: what each must have for the batch to be taken, read a little at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from ...storage.readers import readable
from ...storage.readers.json_lines import MAX_LINE_BYTES, BadRow, numbered_lines, parse_object
from ...storage.rows.external_sort import ExternalSorter

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
RESPONSES = "/v1/responses"
ENDPOINTS = (CHAT, COMPLETIONS, RESPONSES)
# Of which rows are conversations.
CHATS = (CHAT, RESPONSES)

# A list of a million errors helps nobody.
_MAX_ERRORS = 1000
_MAX_CUSTOM_ID = 512
_SORT_MEMORY_BYTES = 32 * 2**20


@dataclass(frozen=True)
class LineError:
    """Why a batch can not be taken, as its `errors.data` says it. `line` counts from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"code": self.code, "line": self.line, "message": self.message, "param": self.param}


class LineFault(Exception):
    """A line that keeps its batch from being taken."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


@dataclass(frozen=True)
class BatchLine:
    """One request of an input file; `body` is an object, of which nothing more is known."""

    line: int
    custom_id: str
    body: dict[str, Any]


@dataclass
class CheckedLines:
    """What was found in an input file: all its errors, or the number of its requests and the model they name."""

    num_lines: int = 0
    model: str | None = None
    errors: list[LineError] = field(default_factory=list)
    num_errors: int = 0

    def add(self, error: LineError) -> None:
        self.num_errors += 1
        if len(self.errors) < _MAX_ERRORS:
            self.errors.append(error)


def check_lines(
    path: Path, endpoint: str, expect_served: Callable[[str], None], sort_folder: Path, on_line: Callable[[], None]
) -> CheckedLines:
    """Read the whole file once; memory does not grow with it. Raises InputError, StorageError.

    `expect_served`: raises `LineFault` for a model that is not.
    `sort_folder`: where the custom_ids go that do not fit into memory. `on_line` is called now and then, and may raise.
    """
    found = CheckedLines()
    with ExternalSorter(sort_folder, _SORT_MEMORY_BYTES) as custom_ids:
        for number, text in lines_of(path):
            found.num_lines += 1
            on_line()
            try:
                line = parse_line(number, text, endpoint)
                _check_model(line, found, expect_served)
            except LineFault as fault:
                found.add(LineError(fault.code, str(fault), number, fault.param))
            else:
                custom_ids.add(line.custom_id.encode(), number.to_bytes(8))
        _find_duplicates(custom_ids, found)
    if not found.num_lines:
        found.add(LineError("empty_file", "The input file has no requests."))
    if (hidden := found.num_errors - len(found.errors)) > 0:
        found.errors.append(LineError("too_many_errors", f"There are {hidden} more errors."))
    return found


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """As `numbered_lines`, of a file. Raises InputError."""
    with readable(path.name), path.open("rb") as file:
        yield from numbered_lines(file)


def parse_line(number: int, text: bytes, endpoint: str) -> BatchLine:
    """Raises `LineFault`."""
    if len(text) > MAX_LINE_BYTES:
        raise LineFault("invalid_json_line", f"The line is longer than {MAX_LINE_BYTES} bytes.")
    try:
        values = parse_object(text)
    except BadRow as error:
        raise LineFault("invalid_json_line", f"The line is {error}.") from error
    for name in ("custom_id", "method", "url", "body"):
        if values.get(name) is None:
            raise LineFault("missing_required_parameter", f"Missing required parameter: '{name}'.", name)
    _check_envelope(values, endpoint)
    return BatchLine(number, values["custom_id"], values["body"])


def _check_envelope(values: dict[str, Any], endpoint: str) -> None:
    custom_id = values["custom_id"]
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= _MAX_CUSTOM_ID:
        message = f"'custom_id' must be a text of 1 to {_MAX_CUSTOM_ID} characters."
        raise LineFault("invalid_value", message, "custom_id")
    if "\0" in custom_id:
        raise LineFault("invalid_value", "'custom_id' must be a text without NUL.", "custom_id")
    if values["method"] != "POST":
        raise LineFault("invalid_method", "'method' must be 'POST'.", "method")
    if values["url"] != endpoint:
        raise LineFault("invalid_url", f"'url' must be {endpoint!r}, the endpoint of the batch.", "url")
    if not isinstance(values["body"], dict):
        raise LineFault("invalid_type", "'body' must be an object.", "body")


def _check_model(line: BatchLine, found: CheckedLines, expect_served: Callable[[str], None]) -> None:
    model = line.body.get("model")
    if not isinstance(model, str) or not model:
        raise LineFault("missing_required_parameter", "Missing required parameter: 'model'.", "body.model")
    if found.model is None:
        expect_served(model)
        found.model = model
    elif model != found.model:
        message = f"All requests of a batch must name one model: this is {model!r}, before it was {found.model!r}."
        raise LineFault("mismatched_model", message, "body.model")


def _find_duplicates(custom_ids: ExternalSorter, found: CheckedLines) -> None:
    duplicates: list[LineError] = []
    for custom_id, items in groupby(custom_ids, key=itemgetter(0)):
        (_, first), *others = items
        for _, line in others:
            if found.num_errors + len(duplicates) < _MAX_ERRORS:
                message = f"The custom_id {custom_id.decode()!r} is also that of line {int.from_bytes(first)}."
                duplicates.append(LineError("duplicate_custom_id", message, int.from_bytes(line), "custom_id"))
            else:
                found.num_errors += 1
    for error in duplicates:
        found.add(error)
    found.errors.sort(key=lambda error: error.line or 0)
