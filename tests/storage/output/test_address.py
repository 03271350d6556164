"""Which kind of output folder an address names, and which addresses are refused."""

from pathlib import Path

import pytest

from headrace.storage.errors import StorageError
from headrace.storage.output.address import has_file, open_folder
from headrace.storage.output.local_folder import LocalFolder
from headrace.storage.output.remote_folder import RemoteFolder


@pytest.mark.parametrize(
    ("address", "path"),
    [
        ("out", Path("out").absolute()),
        (Path("out/"), Path("out").absolute()),
        ("/tmp/out", Path("/tmp/out")),
        ("a:b/c", Path("a:b/c").absolute()),
        ("file:///tmp/out", Path("/tmp/out")),
        ("FILE://out", Path("out").absolute()),
        ("local:///tmp/out/", Path("/tmp/out")),
        ("~/out", Path.home() / "out"),
        (Path("~/out"), Path.home() / "out"),
        ("a/~/b", Path("a/~/b").absolute()),
    ],
)
def test_folders_of_this_host(address: str | Path, path: Path) -> None:
    assert open_folder(address) == LocalFolder(path)
    assert str(open_folder(address)) == str(path)


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("s3://bucket/a/b", "s3://bucket/a/b"),
        ("S3://Bucket/a//", "s3://Bucket/a"),
        ("gs://bucket", "gs://bucket"),
        ("abfss://container@account.dfs.core.windows.net/a", "abfss://container@account.dfs.core.windows.net/a"),
        ("s3://bucket/key:1", "s3://bucket/key:1"),
    ],
)
def test_folders_of_stores(address: str, url: str) -> None:
    assert open_folder(address) == RemoteFolder(url)
    assert str(open_folder(address)) == url
    assert open_folder(str(open_folder(address))) == open_folder(address)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("s3://key:secret@bucket/a", "has a user and a password: leave it out"),
        ("s3://key:se/secret@bucket/a", "has a user and a password"),
        (Path("s3://key:secret@bucket/a"), "has a user and a password"),
        ("s3://bucket/a?X-Amz-Signature=secret", "s3://bucket/a must be a plain URL such as s3://bucket/folder"),
        ("simplecache::s3://bucket/a", "must be a plain URL"),
        ("s3://bucket/a*", "must be a plain URL"),
        ("s3://bucket/a[1]", "must be a plain URL"),
        ("s3://", "must be a plain URL"),
        ("", "output is empty: name a folder"),
        ("memory://bucket/a", "this process's memory"),
        (Path("s3://bucket/a"), "s3:/bucket/a is a URL that has lost a slash: pass it as text"),
    ],
)
def test_what_an_address_must_not_be(address: str | Path, words: str) -> None:
    with pytest.raises(StorageError) as caught:
        open_folder(address)
    assert words in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("folder", "address"),
    [
        ("out", "out/part.parquet"),
        ("out", "./a/../out/part.parquet"),
        ("~/out", str(Path.home() / "out" / "part.parquet")),
        ("file:///tmp/out", "/tmp/out/part.parquet"),
        ("/tmp/out/", "local:///tmp/out/part.parquet"),
        ("shelf://bucket/a", "shelf://bucket/a/part.parquet"),
        ("SHELF://bucket/a/", "shelf://bucket/a/part.parquet"),
    ],
)
def test_a_file_in_a_folder_is_found_by_any_of_their_names(shelf: None, folder: str, address: str) -> None:
    assert has_file(open_folder(folder), address)


@pytest.mark.parametrize(
    ("folder", "address"),
    [
        ("out", "out/below/part.parquet"),
        ("out", "out"),
        ("out", "shelf://out/part.parquet"),
        ("shelf://bucket/a", "a/part.parquet"),
        ("shelf://bucket/a", "shelf://bucket/a/b/part.parquet"),
        ("shelf://bucket/a", "shelf://bucket/ab/part.parquet"),
        ("shelf://bucket/a", "memory://bucket/a/part.parquet"),
    ],
)
def test_a_file_elsewhere_is_not_in_a_folder(shelf: None, folder: str, address: str) -> None:
    assert not has_file(open_folder(folder), address)
