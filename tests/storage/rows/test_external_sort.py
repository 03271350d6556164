"""Sorting with far less memory than the items take."""

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from headrace.storage.errors import StorageError
from headrace.storage.rows import external_sort
from headrace.storage.rows.external_sort import ExternalSorter


def random_items(count: int, seed: int) -> list[tuple[bytes, bytes]]:
    generator = random.Random(seed)
    return [(generator.randbytes(generator.randint(0, 3)), str(number).encode()) for number in range(count)]


@pytest.mark.parametrize("memory_bytes", [1, 5_000, 10**9], ids=["a run each", "some runs", "all in memory"])
@pytest.mark.parametrize("count", [0, 1, 300])
def test_comes_back_in_order_and_stable(tmp_path: Path, memory_bytes: int, count: int) -> None:
    items = random_items(count, seed=count)
    with ExternalSorter(tmp_path, memory_bytes) as sorter:
        for key, payload in items:
            sorter.add(key, payload)
        expected = sorted(items, key=lambda item: item[0])
        assert list(sorter) == expected
        assert list(sorter) == expected


@pytest.mark.parametrize("large", [[0], [255], [3, 4, 299], range(300)], ids=str)
def test_large_items_are_not_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: Sequence[int]
) -> None:
    monkeypatch.setattr(external_sort, "_BLOCK_BYTES", 5_000)
    items = [(b"%03d" % number, b"x" * (2_000 if number in large else 3)) for number in range(300)]
    with ExternalSorter(tmp_path, memory_bytes=40_000) as sorter:
        sorter.extend(items[::-1])
        (run,) = sorter._runs
        assert max(map(_num_bytes, external_sort._read_blocks(run))) <= 5_000
        assert list(sorter) == items


def _num_bytes(block: list[tuple[bytes, bytes]]) -> int:
    return sum(len(key) + len(payload) for key, payload in block)


def test_whoever_is_killed_leaves_no_file_behind(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "folder"
    with ExternalSorter(folder, memory_bytes=1000) as sorter:
        for number in range(100):
            sorter.add(b"%03d" % (number % 7), b"x" * 50)
        assert len(sorter._runs) > 1
        assert list(folder.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.touch()
    with ExternalSorter(blocked, memory_bytes=1) as sorter, pytest.raises(StorageError, match="cannot sort in"):
        sorter.add(b"key", b"payload")


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by closing what could not be written."""
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda dir: Path("/dev/full").open("r+b"))  # noqa: SIM115
    with (
        pytest.raises(StorageError, match=f"cannot sort in {tmp_path}: No space left"),
        ExternalSorter(tmp_path, memory_bytes=1) as sorter,
    ):
        sorter.add(b"key", b"payload")


@pytest.mark.parametrize("num_bytes_left", [-5, 5])
def test_a_damaged_run_is_told(tmp_path: Path, num_bytes_left: int) -> None:
    with ExternalSorter(tmp_path, memory_bytes=1) as sorter:
        sorter.add(b"key", b"payload")
        (run,) = sorter._runs
        run.truncate(num_bytes_left % run.seek(0, 2))
        with pytest.raises(StorageError, match=f"cannot read what was sorted in {tmp_path}"):
            list(sorter)


def test_can_be_read_twice_at_a_time(tmp_path: Path) -> None:
    with ExternalSorter(tmp_path, memory_bytes=5_000) as sorter:
        sorter.extend((b"%04d" % number, b"x" * 50) for number in range(2_000))
        sorter.extend((b"%04d" % number, b"x" * 50) for number in range(2_000))
        assert all(one == other for one, other in zip(sorter, sorter, strict=True))
