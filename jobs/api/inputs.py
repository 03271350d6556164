"""A job's input: rows of the request, a file that was uploaded, or what lies at a URL."""

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import urlsplit

import httpx2

from ...storage.errors import InputError
from ...storage.readers import FORMATS, InputSource, open_input
from ..errors import SpecError
from ..outside.addresses import AddressRefused, check_prefix, is_web_url, outside_client
from ..settings import Settings
from .errors import RateLimited

# Without a byte, and in all: a sender must not hold one of the server's threads for as long as it likes.
_TIMEOUT_SECONDS = 30.0
_DOWNLOAD_SECONDS = 900.0
_MAX_DOWNLOAD_BYTES = 16 * 2**30
_PIECE_BYTES = 2**20
# Each has one of the server's threads for as long as its sender likes: the others are for everybody else.
_MAX_DOWNLOADS = 8
_RETRY_SECONDS = 5.0
_downloads = threading.BoundedSemaphore(_MAX_DOWNLOADS)
# A compression of the way would be taken off, one of the file not, and senders mix them up.
_AS_IT_IS = {"Accept-Encoding": "identity"}
_ENDINGS = frozenset((*FORMATS, ".gz", ".zst"))


class Inputs:
    """Opens inputs, each for as long as it takes to submit them. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    @contextmanager
    def uploaded(self, name: str, file: BinaryIO, format: str | None, limit: int | None) -> Iterator[InputSource]:
        """What was sent under a name. Raises `InputError`, which calls it by that name."""
        with self._local(name, format) as path:
            with path.open("wb") as copy:
                shutil.copyfileobj(file, copy, _PIECE_BYTES)
            yield open_input(path, limit, name)

    @contextmanager
    def stored(self, name: str, path: Path, format: str | None, limit: int | None) -> Iterator[InputSource]:
        """A file of our own that a client knows by a name. Raises `InputError`, which calls it by that name."""
        with self._local(name, format) as link:
            link.symlink_to(path)
            yield open_input(link, limit, name)

    @contextmanager
    def at(self, url: str, format: str | None, limit: int | None) -> Iterator[InputSource]:
        """What is at a URL. Raises `SpecError` where the server does not allow it, `InputError`."""
        try:
            check_prefix(url, self._settings.input_urls)
        except AddressRefused as error:
            raise SpecError(f"input_url {error}: see HEADRACE_INPUT_URLS", field="input_url") from error
        if not is_web_url(url):
            yield open_input(url, limit)
            return
        with self._local(url, format) as path:
            with _a_download():
                asyncio.run(self._download(url, path))
            yield open_input(path, limit, "input_url")

    async def _download(self, url: str, path: Path) -> None:
        try:
            async with (
                asyncio.timeout(_DOWNLOAD_SECONDS),
                outside_client(self._settings.allow_private_addresses, _TIMEOUT_SECONDS) as client,
                client.stream("GET", url, headers=_AS_IT_IS) as response,
            ):
                await _save(response, path)
        except AddressRefused as error:
            raise SpecError(f"input_url {error}", field="input_url") from error
        except TimeoutError as error:
            raise InputError(f"input_url was not read in {_DOWNLOAD_SECONDS:.0f} s") from error
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise InputError(f"input_url cannot be read: {reason}") from error

    @contextmanager
    def _local(self, name: str, format: str | None) -> Iterator[Path]:
        """A name for a file with the ending that says its format."""
        parent = self._settings.inputs_folder
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=parent) as folder:
            yield Path(folder, f"input{_ending(name, format)}")


@contextmanager
def _a_download() -> Iterator[None]:
    if not _downloads.acquire(blocking=False):
        message = f"{_MAX_DOWNLOADS} inputs are being read from URLs, as many as may be at a time: try again soon"
        raise RateLimited("requests", message, _RETRY_SECONDS)
    try:
        yield
    finally:
        _downloads.release()


async def _save(response: httpx2.Response, path: Path) -> None:
    if response.status_code != 200:
        raise InputError(f"input_url is answered with status {response.status_code}: check it")
    num_bytes = 0
    with path.open("wb") as file:
        async for piece in response.aiter_bytes(_PIECE_BYTES):
            num_bytes += len(piece)
            if num_bytes > _MAX_DOWNLOAD_BYTES:
                raise InputError(f"input_url has more than {_MAX_DOWNLOAD_BYTES} bytes: split it")
            await asyncio.to_thread(file.write, piece)


def _ending(name: str, format: str | None) -> str:
    if format is not None:
        return f".{format}"
    suffixes = PurePosixPath(urlsplit(name).path if "://" in name else name).suffixes[-2:]
    return "".join(suffix.lower() for suffix in suffixes if suffix.lower() in _ENDINGS)
