"""Who may write into an output folder."""

import json
from pathlib import Path

import pytest

from headrace.storage.errors import ManifestDamaged, OutputNotEmpty, StorageError
from headrace.storage.output_dir import (
    MANIFEST_NAME,
    Manifest,
    OutputMode,
    complete_manifest,
    prepare_output_dir,
    read_manifest,
    write_manifest,
)

MANIFEST = Manifest("job-1", "abc")
OURS = ["part-00000-01-000.parquet", ".part-00000-02-000.parquet.tmp", "._headrace.json.tmp"]


@pytest.fixture
def used(tmp_path: Path) -> Path:
    """A folder as a job leaves it that was killed."""
    folder = tmp_path / "used"
    folder.mkdir()
    write_manifest(folder, MANIFEST)
    for name in OURS:
        (folder / name).touch()
    return folder


@pytest.mark.parametrize("mode", OutputMode)
def test_new_folder_is_made_in_every_mode(mode: OutputMode, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    for _ in range(2):
        assert prepare_output_dir(folder, mode) is None
        assert list(folder.iterdir()) == []


def test_new_refuses_a_used_folder(used: Path) -> None:
    with pytest.raises(OutputNotEmpty) as caught:
        prepare_output_dir(used, OutputMode.NEW)
    advice = "pass --resume to finish it or --overwrite to replace it"
    assert str(caught.value) == f"output folder {used} is not empty: {advice}"


def test_resume_returns_the_manifest_and_touches_nothing(used: Path) -> None:
    before = sorted(used.iterdir())
    assert prepare_output_dir(used, OutputMode.RESUME) == MANIFEST
    assert sorted(used.iterdir()) == before


def test_resume_wants_a_manifest(used: Path) -> None:
    (used / MANIFEST_NAME).unlink()
    with pytest.raises(OutputNotEmpty, match="no headrace job to resume"):
        prepare_output_dir(used, OutputMode.RESUME)


def test_overwrite_removes_what_headrace_wrote(used: Path) -> None:
    assert prepare_output_dir(used, OutputMode.OVERWRITE) is None
    assert list(used.iterdir()) == []


@pytest.mark.parametrize("foreign", ["notes.txt", "part-1.parquet", "part-00000-01-000.parquet.bak", ".hidden"])
def test_overwrite_touches_nothing_beside_foreign_files(used: Path, foreign: str) -> None:
    (used / foreign).touch()
    with pytest.raises(OutputNotEmpty, match=f"holds {foreign}, not written by headrace"):
        prepare_output_dir(used, OutputMode.OVERWRITE)
    assert len(list(used.iterdir())) == len(OURS) + 2


@pytest.mark.parametrize("mode", OutputMode)
@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_file_in_the_way(mode: OutputMode, name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="is not a folder"):
        prepare_output_dir(tmp_path / name, mode)


def test_manifest_comes_back(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    assert read_manifest(tmp_path / "missing") is None
    write_manifest(tmp_path, MANIFEST)
    assert read_manifest(tmp_path) == MANIFEST
    assert [path.name for path in tmp_path.iterdir()] == [MANIFEST_NAME]


def test_folder_is_taken_once(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    with pytest.raises(OutputNotEmpty, match="taken by another job"):
        write_manifest(tmp_path, Manifest("job-2", "abc"))
    assert read_manifest(tmp_path) == MANIFEST


@pytest.mark.parametrize("content", ["", "{", "[]", '{"job_id": "x"}'])
def test_damaged_manifest(content: str, used: Path) -> None:
    (used / MANIFEST_NAME).write_text(content)
    with pytest.raises(ManifestDamaged, match="damaged: pass --overwrite"):
        prepare_output_dir(used, OutputMode.RESUME)
    prepare_output_dir(used, OutputMode.OVERWRITE)


def test_a_completed_manifest_says_more_and_still_whose_it_is(tmp_path: Path) -> None:
    write_manifest(tmp_path, MANIFEST)
    complete_manifest(tmp_path, MANIFEST, {"rows": {"total": 3}})
    written = json.loads((tmp_path / MANIFEST_NAME).read_text())
    assert written == {"job_id": "job-1", "fingerprint": "abc", "rows": {"total": 3}}
    assert read_manifest(tmp_path) == MANIFEST
    complete_manifest(tmp_path, MANIFEST, {"rows": {"total": 4}})
    assert json.loads((tmp_path / MANIFEST_NAME).read_text())["rows"] == {"total": 4}


def test_the_manifest_of_another_job_is_left_alone(tmp_path: Path) -> None:
    complete_manifest(tmp_path, MANIFEST, {"rows": 1})
    assert not list(tmp_path.iterdir())
    write_manifest(tmp_path, Manifest("job-2", "abc"))
    complete_manifest(tmp_path, MANIFEST, {"rows": 1})
    assert "rows" not in (tmp_path / MANIFEST_NAME).read_text()
