"""The names of token streams and of all they have in Redis: here and nowhere else. docs/streams.md explains them."""

import re
import uuid

STREAM_PREFIX = "headrace:stream:"
WRITER_PREFIX = "headrace:writer:"
FRAMES_PREFIX = "headrace:frames:"
WATCH_PREFIX = "headrace:watch:"
TOKENS_PREFIX = "headrace:tokens:"
# Long enough for a reader that was away; what it then still lacks is in the job's output.
DEFAULT_TTL_SECONDS = 3600
# Names stand in Redis commands and JSON as they are.
_NAME = re.compile(r"[A-Za-z0-9_.:-]+(/[0-9]+)?")


class StreamIdError(ValueError):
    """A stream's id or a reader's has characters that no such id has."""


def row_stream_id(job_id: str, row: int) -> str:
    """The stream of a bulk job's row."""
    return f"{job_id}/{row}"


def new_reader_id() -> str:
    """An id of its own for a process that follows many streams: what requests name as `reply_to`."""
    return f"reader_{uuid.uuid4().hex}"


def is_request(stream_id: str) -> bool:
    """Whether a stream is a live request's, or one of its samples'; else it is a bulk row's."""
    return stream_id.startswith("req_")


def stream_key(stream_id: str) -> str:
    """The Redis Stream with the tokens; its channel has the same name. Raises StreamIdError."""
    return STREAM_PREFIX + checked(stream_id)


def stream_channel(stream_id: str) -> str:
    """Where the ids of new entries are published. Raises StreamIdError."""
    return stream_key(stream_id)


def writer_key(stream_id: str) -> str:
    """The number of the attempt that may write. Raises StreamIdError."""
    return WRITER_PREFIX + checked(stream_id)


def frames_channel(reader_id: str) -> str:
    """Where everything new for one reader is published, one message a flush. Raises StreamIdError."""
    return FRAMES_PREFIX + checked(reader_id)


def watch_key(job_id: str) -> str:
    """Which rows of a bulk job somebody watches. Raises StreamIdError."""
    return WATCH_PREFIX + checked(job_id)


def tokens_key(shard_id: str) -> str:
    """What the next attempt at a shard goes on from. Raises StreamIdError."""
    return TOKENS_PREFIX + checked(shard_id)


def checked(name: str) -> str:
    """The name itself. Raises StreamIdError if it can not be one of a stream or a reader."""
    if not _NAME.fullmatch(name):
        raise StreamIdError(f"{name!r} can not be a stream's or a reader's id")
    return name
