"""Many parts are read some at a time."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from headrace.storage.errors import PartDamaged, PartMissing
from headrace.storage.output import part_groups
from headrace.storage.output.local_folder import LocalFolder
from headrace.storage.output.part_groups import PartGroups
from headrace.storage.output.remote_folder import RemoteFolder

from ...shelf import make_bucket


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PartGroups:
    """Eight parts of ten rows, of which four are gone, in groups of three."""
    monkeypatch.setattr(part_groups, "_GROUP_PARTS", 3)
    folder = LocalFolder(tmp_path)
    names = [f"part-{number:05d}-01-000.parquet" for number in range(8)]
    for number, name in enumerate(names):
        rows = range(10 * number, 10 * number + 10)
        folder.write_part(name, pa.table({"row": rows, "text": [str(row) for row in rows]}))
        folder.publish(name)
    for number in (1, 3, 4, 5):
        folder.withdraw(names[number])
    return PartGroups(folder, names)


def test_a_store_is_listed_once(shelf: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many groups there are: of many parts that takes many requests."""
    monkeypatch.setattr(part_groups, "_GROUP_PARTS", 3)
    make_bucket("bucket")
    folder = RemoteFolder("shelf://bucket/out")
    names = [f"part-{number:05d}-01-000.parquet" for number in range(8)]
    for name in names[1:]:
        folder.write_part(name, pa.table({"row": [1]}))
    num_listings = 0

    def listed(folder: RemoteFolder) -> list[str]:
        nonlocal num_listings
        num_listings += 1
        return part_names(folder)

    part_names = RemoteFolder.part_names
    monkeypatch.setattr(RemoteFolder, "part_names", listed)
    assert [len(table) for table in PartGroups(folder, names).tables()] == [3, 3, 1]
    assert num_listings == 1


ROWS = [*range(10), *range(20, 30), *range(60, 80)]


def test_no_more_than_a_group_is_read_at_a_time(parts: PartGroups) -> None:
    assert [table["row"].to_pylist() for table in parts.tables()] == [ROWS[:30], ROWS[30:]]
    assert [table.column_names for table in parts.tables(["row"])] == [["row"], ["row"]]
    some = parts.tables(["text"], pc.is_in(pc.field("row"), pa.array([9, 10, 71])))
    assert [table["text"].to_pylist() for table in some] == [["9"], ["71"]]


@pytest.mark.parametrize("num_rows", [3, 10, 100])
def test_batches_are_no_larger_than_asked(parts: PartGroups, num_rows: int) -> None:
    batches = list(parts.batches(num_rows))
    assert max(map(len, batches)) == min(num_rows, 10)
    assert pa.concat_tables(batches)["row"].to_pylist() == ROWS


MERGED = "part-00000-01-009.parquet"
READS: list[Callable[[PartGroups], Iterator[pa.Table]]] = [
    lambda parts: parts.batches(3),
    lambda parts: parts.tables(["row", "text"]),
    lambda parts: parts.tables(["row"], pc.field("row") >= 0),
]


@pytest.mark.parametrize("read", READS, ids=["batches", "tables", "filtered"])
@pytest.mark.parametrize("num_read", [0, 1, 3], ids=lambda num: f"{num} pieces read")
def test_rows_of_parts_that_are_merged_meanwhile_are_read_once(
    parts: PartGroups, read: Callable[[PartGroups], Iterator[pa.Table]], num_read: int
) -> None:
    """A part that was read and two that were not become one, with rows that were in none."""
    names = [name for name in parts.names if parts.folder.find_parts([name])]

    def merge() -> None:
        merged = names[0], names[2], names[3]
        new = pa.table({"row": [99], "text": ["99"]})
        parts.folder.write_part(MERGED, pa.concat_tables([*map(parts.folder.read_part, merged), new]))
        parts.folder.remove_merged(merged)
        names[:] = [names[1], MERGED]

    pieces = read(PartGroups(parts.folder, list(names), lambda: names))
    found = [next(pieces) for _ in range(num_read)] if num_read < 3 else list(pieces)
    merge()
    found += pieces
    rows = [row for piece in found for row in piece["row"].to_pylist()]
    assert sorted(rows) == (ROWS if num_read == 3 else [*ROWS, 99])


def test_a_part_that_is_given_its_name_while_it_is_read_is_found_again(
    parts: PartGroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (name, *_) = parts.folder, parts.names
    assert isinstance(folder, LocalFolder)
    (folder.path / name).rename(folder.path / f".{name}.tmp")
    place = LocalFolder._place

    def looked_up(folder: LocalFolder, name: str) -> Path | None:
        found = place(folder, name)
        folder.publish(name) if found is not None else None
        return found

    monkeypatch.setattr(LocalFolder, "_place", looked_up)
    assert [table["row"].to_pylist() for table in parts.tables(["row"])] == [ROWS[:30], ROWS[30:]]


def test_a_part_that_may_not_be_missed_is_told(parts: PartGroups) -> None:
    strict = PartGroups(parts.folder, parts.names, lambda: parts.names, may_miss=False)
    with pytest.raises(PartMissing, match=f"{parts.names[1]} is gone: it was removed"):
        list(strict.batches(100))


@pytest.mark.parametrize(
    "read", [PartGroups.tables, partial(PartGroups.batches, num_rows=100)], ids=["tables", "batches"]
)
def test_a_part_that_cannot_be_read_is_told(
    parts: PartGroups, read: Callable[[PartGroups], Iterator[pa.Table]]
) -> None:
    assert isinstance(parts.folder, LocalFolder)
    (parts.folder.path / parts.names[2]).write_bytes(b"no Parquet")
    with pytest.raises(PartDamaged, match=f"{parts.folder}.* cannot be read: .*Parquet"):
        list(read(parts))
