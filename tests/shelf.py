"""An object store for tests, which fsspec opens as shelf://BUCKET/KEY: whole objects under keys, and nothing else.

No folders, no renames, no appending. Objects are files of SHELF_ROOT, so that all processes which have that variable
share them; listings are remembered until `invalidate_cache`, as by s3fs. Stands alone: workers import it as a plug-in.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from fsspec.spec import AbstractFileSystem

# What is tried here is refused.
READ_ONLY = "read-only"
STRANGE = "strange"


class NoCredentialsError(Exception):
    """Such as botocore has: not one of OSError's."""


class Shelf(AbstractFileSystem):  # type: ignore[misc]
    """Buckets have to be there: `make_bucket`."""

    protocol = "shelf"

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            self.dircache[path] = list(self._listing(path))
        entries = self.dircache[path]
        if not entries:
            raise FileNotFoundError(path)
        return entries if detail else [entry["name"] for entry in entries]

    def _listing(self, path: str) -> Iterator[dict[str, Any]]:
        bucket, _, key = path.partition("/")
        prefix, seen = f"{key}/" if key else "", set()
        for other, size in _objects(bucket):
            child, slash, _ = other.removeprefix(prefix).partition("/")
            if other == key:
                yield {"name": path, "type": "file", "size": size}
            elif other.startswith(prefix) and child not in seen:
                seen.add(child)
                name = f"{bucket}/{prefix}{child}"
                yield {"name": name, "type": "directory" if slash else "file", "size": size}

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        return {"name": path, "type": "file", "size": _object(path).stat().st_size}

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        place = _object(self._strip_protocol(path))
        if place.parent.name == READ_ONLY:
            raise PermissionError("Access Denied")
        with tempfile.NamedTemporaryFile(dir=place.parent.parent) as file:
            file.write(value)
            file.flush()
            if mode == "create":
                os.link(file.name, place)
                return
            whole = Path(f"{file.name}.whole")
            os.link(file.name, whole)
            whole.rename(place)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        return _object(self._strip_protocol(path)).read_bytes()[start:end]

    def rm_file(self, path: str) -> None:
        _object(self._strip_protocol(path)).unlink()

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()


def install_for_workers(folder: Path) -> dict[str, str]:
    """Put the store into a folder as a plug-in of fsspec's; returns the variables of processes that are to have it."""
    packages, root = folder / "packages", folder / "shelf"
    about = packages / "shelf_store-1.dist-info"
    about.mkdir(parents=True)
    root.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: shelf-store\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[fsspec.specs]\nshelf = shelf_store:Shelf\n")
    (packages / "shelf_store.py").write_text(Path(__file__).read_text())
    path = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "SHELF_ROOT": str(root)}


def make_bucket(name: str) -> Path:
    """The folder whose files are the bucket's objects."""
    folder = Path(os.environ["SHELF_ROOT"], name)
    folder.mkdir()
    return folder


def keys(bucket: str) -> list[str]:
    return sorted(unquote(file.name) for file in _bucket(bucket).iterdir())


def _objects(bucket: str) -> Iterator[tuple[str, int]]:
    """Keys and sizes; what another process removes meanwhile is passed over, not the whole listing."""
    for file in sorted(_bucket(bucket).iterdir()):
        with suppress(FileNotFoundError):
            yield unquote(file.name), file.stat().st_size


def _bucket(name: str) -> Path:
    if name == STRANGE:
        raise NoCredentialsError("Unable to locate\ncredentials")
    folder = Path(os.environ["SHELF_ROOT"], name)
    if not folder.is_dir():
        raise FileNotFoundError("The specified bucket does not exist")
    return folder


def _object(path: str) -> Path:
    bucket, _, key = path.partition("/")
    return _bucket(bucket) / quote(key, safe="")
