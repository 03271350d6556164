"""Where an input's bytes are: a local path, or a URL that fsspec knows; plain, gzipped or with zstd."""

import gzip
import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

import pyarrow as pa

from ..errors import InputError
from .readable import readable

_COMPRESSIONS = (".gz", ".zst")


@dataclass(frozen=True)
class Location:
    """A file or a folder; `address` is a path or a URL such as s3://bucket/rows.jsonl.zst."""

    address: str
    # What the user calls it, where that is not the address.
    called: str | None = None

    @property
    def is_remote(self) -> bool:
        return "://" in self.address

    @property
    def name(self) -> str:
        """What it is called; of a URL without the password that it can hold."""
        if self.called is not None:
            return self.called
        if not self.is_remote:
            return self.address
        parts = urlsplit(self.address)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()

    @property
    def file_name(self) -> str:
        """The last part of the address."""
        return self._path.name

    @property
    def format(self) -> str:
        """The extension that names the format, lower case: `.jsonl` of `rows.jsonl.gz`."""
        return self._path.with_suffix("").suffix.lower() if self._compression else self._path.suffix.lower()

    @property
    def filesystem(self) -> tuple[Any, str]:
        """fsspec's file system for a URL, and the path in it. Raises InputError when the URL cannot be opened."""
        # A tenth of a second to import, and seldom needed.
        from fsspec.core import url_to_fs

        try:
            filesystem, path = url_to_fs(self.address)
        except (ImportError, ValueError) as error:
            raise InputError(f"input {self.name} cannot be opened: {error}") from error
        return filesystem, path

    def exists(self) -> bool:
        with readable(self.name):
            if not self.is_remote:
                return Path(self.address).exists()
            filesystem, path = self.filesystem
            return bool(filesystem.exists(path))

    def is_folder(self) -> bool:
        if not self.is_remote:
            return Path(self.address).is_dir()
        filesystem, path = self.filesystem
        return bool(filesystem.isdir(path))

    def is_stream(self) -> bool:
        """Whether its bytes are gone once they are read, as a pipe's are."""
        return not self.is_remote and Path(self.address).exists() and not Path(self.address).is_file()

    def child(self, name: str) -> "Location":
        """What a folder holds under this name, or would hold."""
        return Location(f"{self.address.rstrip('/')}/{name}")

    def children(self) -> "list[Location]":
        """What a folder holds, by name; hidden files and those that begin with _ belong to tools and are left out."""
        if self.is_remote:
            filesystem, path = self.filesystem
            addresses = [filesystem.unstrip_protocol(name) for name in filesystem.ls(path, detail=False)]
        else:
            addresses = [str(path) for path in Path(self.address).iterdir()]
        children = [Location(address) for address in sorted(addresses)]
        return [child for child in children if not child.file_name.startswith((".", "_"))]

    @contextmanager
    def open(self) -> Iterator[BinaryIO]:
        """The file's bytes, decompressed."""
        with self.open_raw() as raw:
            if self._compression == ".gz":
                with gzip.open(raw) as file:
                    yield cast(BinaryIO, file)
            elif self._compression == ".zst":
                with pa.CompressedInputStream(raw, "zstd") as stream:
                    yield cast(BinaryIO, io.BufferedReader(stream, 1024**2))
            elif self.is_remote:
                # Some file systems' own files read whole lines only.
                yield cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, raw), 1024**2))
            else:
                yield raw

    @contextmanager
    def open_raw(self) -> Iterator[BinaryIO]:
        """The file's bytes as they are stored."""
        if self.is_remote:
            filesystem, path = self.filesystem
            with filesystem.open(path, "rb") as file:
                yield file
        else:
            with Path(self.address).open("rb") as file:
                yield file

    def fingerprint(self) -> str:
        """The SHA-256 of the stored bytes, in hexadecimal. Raises InputError."""
        with readable(self.name), self.open_raw() as file:
            return hashlib.file_digest(cast(io.BufferedReader, file), "sha256").hexdigest()

    @cached_property
    def _path(self) -> PurePosixPath:
        return PurePosixPath(urlsplit(self.address).path if self.is_remote else self.address)

    @property
    def _compression(self) -> str | None:
        suffix = self._path.suffix.lower()
        return suffix if suffix in _COMPRESSIONS else None
