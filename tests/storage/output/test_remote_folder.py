"""An output folder on an object store: what is asked of the store, and what its failures become."""

from collections.abc import Callable
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from headrace.storage.errors import PartDamaged, PartMissing, StorageError
from headrace.storage.output import parts
from headrace.storage.output.address import open_folder
from headrace.storage.output.remote_folder import RemoteFolder

from ...shelf import READ_ONLY, STRANGE, Shelf, keys, make_bucket

JOB = "job-1"
NAME = "part-00003-01-000.parquet"


@pytest.fixture
def folder(shelf: None) -> RemoteFolder:
    make_bucket("bucket")
    return RemoteFolder("shelf://bucket/a/out")


def table(*rows: int) -> pa.Table:
    return pa.table({"row": pa.array(rows, pa.int64()), "output": ["x"] * len(rows)})


def test_a_folder_that_can_be_written_to_is_left_as_it_was(folder: RemoteFolder) -> None:
    folder.make()
    assert folder.names() == keys("bucket") == []


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("shelf://nowhere/out", "The specified bucket does not exist"),
        (f"shelf://{READ_ONLY}/out", "Access Denied"),
        (f"shelf://{STRANGE}/out", "Unable to locate credentials"),
        ("nosuch://bucket/out", "Protocol not known: nosuch"),
        ("https://example.com/out", ""),
    ],
)
def test_a_folder_that_cannot_be_written_to_is_told_before_any_work(shelf: None, url: str, reason: str) -> None:
    make_bucket(READ_ONLY)
    with pytest.raises(StorageError) as caught:
        open_folder(url).make()
    assert str(caught.value).startswith(f"cannot write to output {url}: {reason}")
    assert "\n" not in str(caught.value)
    assert keys(READ_ONLY) == []


def test_a_store_whose_library_is_missing_is_told_with_its_name() -> None:
    # One that is never among ours.
    with pytest.raises(StorageError, match="cannot write to output oci://bucket/out: Install ocifs"):
        open_folder("oci://bucket/out").make()


def test_all_that_is_directly_in_a_folder_has_its_name_listed(folder: RemoteFolder) -> None:
    store = Shelf()
    for key in ("a/out/b", "a/out/.hidden", "a/out/sub/c", "a/out/sub/d", "a/other", "a/out-of/e", ".headrace-probe"):
        store.pipe_file(f"bucket/{key}", b"1")
    store.pipe_file("bucket/a/out/.headrace-probe", b"")
    assert folder.names() == [".hidden", "b", "sub"]
    # What marks a folder for some tools.
    store.pipe_file("bucket/a/out", b"")
    assert folder.names() == [".hidden", "b", "sub"]
    store.pipe_file("bucket/a/out", b"a file")
    with pytest.raises(StorageError, match="output shelf://bucket/a/out is not a folder"):
        folder.names()
    assert RemoteFolder("shelf://bucket").names() == ["a"]


def test_what_others_write_is_seen_at_once(folder: RemoteFolder) -> None:
    assert folder.names() == []
    RemoteFolder("shelf://bucket/a/out").replace("new", b"1")
    assert folder.names() == ["new"]
    RemoteFolder("shelf://bucket/a/out").remove(["new"])
    assert folder.names() == []


def test_of_two_who_create_a_file_one_does(folder: RemoteFolder) -> None:
    folder.create("name", b"mine")
    with pytest.raises(FileExistsError):
        folder.create("name", b"yours")
    assert folder.read("name") == b"mine"
    # The answer to the first request was lost.
    folder.create("name", b"mine")
    folder.replace("name", b"again")
    assert folder.read("name") == b"again"
    with pytest.raises(FileNotFoundError):
        folder.read("other")


def test_a_part_has_its_name_once_it_is_written(folder: RemoteFolder) -> None:
    folder.write_part(NAME, table(4, 2))
    for _ in range(2):
        folder.publish(NAME)
        assert keys("bucket") == [f"a/out/{NAME}"]
    assert folder.part_names() == folder.find_parts(["gone", NAME]) == [NAME]
    assert folder.read_part(NAME).equals(table(4, 2))
    assert folder.read_part(NAME, ["row"]).column_names == ["row"]
    for remove in (folder.discard, folder.withdraw):
        remove(NAME)
        assert folder.names() == []
    with pytest.raises(PartMissing, match=f"part shelf://bucket/a/out/{NAME} is gone"):
        folder.read_part(NAME)


def test_parts_are_one_data_set(folder: RemoteFolder) -> None:
    names = [parts.part_file_name(JOB, shard, 1, 0) for shard in range(3)]
    for number, name in enumerate(names[:2]):
        folder.write_part(name, table(2 * number, 2 * number + 1))
    found = folder.dataset(folder.find_parts(names))
    assert found.files == names[:2]
    assert found.to_table(filter=ds.field("row") > 1).sort_by("row")["row"].to_pylist() == [2, 3]
    assert folder.dataset([]).files == []
    folder.withdraw(names[1])
    with pytest.raises(FileNotFoundError):
        found.to_table()


def test_what_a_store_fails_with_is_a_storage_error(folder: RemoteFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_part(NAME, table(1))
    found = folder.dataset([NAME])
    calls: list[Callable[[], object]] = [
        folder.make,
        folder.names,
        lambda: folder.read("name"),
        lambda: folder.create("name", b""),
        lambda: folder.replace("name", b""),
        lambda: folder.remove([NAME]),
        lambda: folder.write_part(NAME, table(1)),
        lambda: folder.withdraw(NAME),
        lambda: folder.find_parts([NAME]),
        lambda: folder.open_part(NAME),
        lambda: parts.recover_shard(folder, JOB, 3, 2, [NAME]),
        found.to_table,
    ]
    monkeypatch.setattr("tests.shelf._bucket", _refuse)
    for call in calls:
        with pytest.raises(StorageError, match=r"shelf://bucket/a/out.*: Slow down") as caught:
            call()
        # It may pass: nobody is told to delete the part.
        assert not isinstance(caught.value, PartDamaged | PartMissing)


def _refuse(bucket: str) -> Path:
    raise OSError("Slow down")


def test_recovery_keeps_what_is_committed_and_removes_the_rest(folder: RemoteFolder) -> None:
    committed, replacing, gone = (f"part-00003-01-00{n}.parquet" for n in range(3))
    strays = ["part-00003-01-003.parquet", "part-00003-02-000.parquet"]
    others = ["part-00003-03-000.parquet", "part-00004-01-000.parquet", "part-of-others.parquet"]
    for name in (committed, replacing, *strays, *others):
        folder.write_part(name, table(1, 2))
    recovered = parts.recover_shard(folder, JOB, 3, 3, [committed, gone], also_committed=[replacing])
    assert recovered == parts.Recovered(rows=frozenset({1, 2}), missing=(gone,))
    assert folder.names() == sorted([committed, replacing, *others])


def test_a_damaged_part_is_named(folder: RemoteFolder) -> None:
    folder.replace(NAME, b"PAR1 but not really PAR1")
    with pytest.raises(PartDamaged, match=f"{NAME}.*: delete it, and its rows are generated again$"):
        parts.recover_shard(folder, JOB, 3, 2, [NAME])


def test_settling_withdraws_what_was_replaced(folder: RemoteFolder) -> None:
    old, kept, foreign = "part-00000-01-000.parquet", "part-00000-01-001.parquet", "part-00000-07-000.parquet"
    new = "part-00002-03-000.parquet"
    for name in (old, kept, foreign, new):
        folder.write_part(name, table(1))
    for _ in range(2):
        parts.settle(folder, parts.published_by(folder, JOB, {1, 3}), [kept, new])
        assert folder.names() == [kept, foreign, new]


def test_the_store_for_tests_has_no_renames(shelf: None) -> None:
    store = fsspec.filesystem("shelf")
    make_bucket("bucket")
    store.pipe_file("bucket/a", b"1")
    with pytest.raises(NotImplementedError):
        store.mv("bucket/a", "bucket/b")
