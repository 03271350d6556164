"""Which kind of output folder an address names, and what an address must not be."""

import os
import re
from pathlib import Path

from ..errors import StorageError
from .folder import OutputFolder
from .local_folder import LocalFolder
from .remote_folder import RemoteFolder

_URL = re.compile(r"(?P<protocol>([A-Za-z0-9+.-]+::)*[A-Za-z][A-Za-z0-9+.-]+):(?P<slashes>//?)(?P<place>.*)", re.DOTALL)
_LOCAL = ("file", "local")
# A password may hold slashes.
_PASSWORD = re.compile(r"[^@]*:[^@]*@")
# What begins a query, chains two URLs, or is a pattern for fsspec, which may then remove other files.
_NOT_PLAIN = re.compile(r"::|[?#*\[\]\s]")


def open_folder(address: str | Path) -> OutputFolder:
    """The output folder at a path, where ~ is the home folder, or at a URL that fsspec knows. Touches nothing.

    Raises StorageError for what cannot be one, and for a URL with a password: that belongs into the environment.
    """
    if not isinstance(address, str | Path):
        raise StorageError(f"output must be a path or a URL, not of the type {type(address).__name__}")
    if not str(address):
        raise StorageError("output is empty: name a folder")
    _check_storable(str(address))
    if (url := _URL.match(str(address))) is None:
        return LocalFolder(Path(os.path.expanduser(address)).absolute())
    protocol, place = url["protocol"].lower(), url["place"]
    if protocol in _LOCAL and url["slashes"] == "//":
        return LocalFolder(Path(place).absolute())
    _check(protocol, place)
    if url["slashes"] != "//":
        raise StorageError(f"output {address} is a URL that has lost a slash: pass it as text, not as a path")
    return RemoteFolder(f"{protocol}://{place.rstrip('/')}")


def _check_storable(address: str) -> None:
    """What no system of files, or no ledger, can take."""
    if "\0" in address:
        raise StorageError(f"output {address!r} has a NUL: no path has one")
    try:
        address.encode()
    except UnicodeEncodeError as error:
        raise StorageError(f"output {address!r} is not valid UTF-8: rename it") from error


def is_same_folder(one: str, other: str) -> bool:
    """Whether two addresses as `str` of an `OutputFolder` gives them name one folder, be it by a link."""
    are_paths = not (_URL.match(one) or _URL.match(other))
    return one == other or (are_paths and os.path.realpath(one) == os.path.realpath(other))


def has_file(folder: OutputFolder, address: str) -> bool:
    """Whether a path or URL names a file that is directly in the folder, be it by a link."""
    url = _URL.match(address)
    if url is None or url["protocol"].lower() in _LOCAL:
        path = os.path.realpath(address if url is None else url["place"])
        return isinstance(folder, LocalFolder) and os.path.dirname(path) == os.path.realpath(folder.path)
    return isinstance(folder, RemoteFolder) and folder.has_file(address)


def _check(protocol: str, place: str) -> None:
    if _PASSWORD.match(place):
        advice = "leave it out, credentials are taken from the environment"
        raise StorageError(f"output {protocol}://… has a user and a password: {advice}")
    # What comes after a question mark may be a signature.
    shown = f"{protocol}://{place.partition('?')[0]}"
    if _NOT_PLAIN.search(protocol + place) or not place.strip("/"):
        raise StorageError(f"output {shown} must be a plain URL such as s3://bucket/folder")
    if protocol == "memory":
        raise StorageError(f"output {shown} is this process's memory: choose another, workers have their own")
