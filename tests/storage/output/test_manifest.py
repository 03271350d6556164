"""Who may write into an output folder, on a disk and on an object store."""

import json
from pathlib import Path
from typing import BinaryIO

import pytest

from headrace.storage.errors import ManifestDamaged, OutputNotEmpty, StorageError
from headrace.storage.output import held_file
from headrace.storage.output.folder import OutputFolder
from headrace.storage.output.local_folder import LocalFolder
from headrace.storage.output.manifest import (
    MANIFEST_NAME,
    Manifest,
    OutputMode,
    complete_manifest,
    prepare_output_dir,
    read_manifest,
    remove_output_dir,
    write_manifest,
)

MANIFEST = Manifest("job-1", "abc")
OURS = [
    "._headrace.json.tmp",
    ".part-00000-02-000-0123abcd.parquet.tmp",
    ".part-00000-02-000.parquet.tmp",
    "part-00000-01-000-0123abcd.parquet",
    "part-00000-01-000.parquet",
]


@pytest.fixture
def used(folder: OutputFolder) -> OutputFolder:
    """A folder as a job leaves it that was killed."""
    folder.make()
    write_manifest(folder, MANIFEST)
    for name in OURS:
        folder.replace(name, b"")
    return folder


@pytest.mark.parametrize("mode", OutputMode)
def test_new_folder_is_made_in_every_mode(mode: OutputMode, folder: OutputFolder) -> None:
    for _ in range(2):
        assert prepare_output_dir(folder, mode) is None
        assert folder.names() == []
        assert folder.exists()


def test_new_refuses_a_used_folder(used: OutputFolder) -> None:
    with pytest.raises(OutputNotEmpty) as caught:
        prepare_output_dir(used, OutputMode.NEW)
    advice = 'pass mode="resume" to finish it or mode="overwrite" to replace it'
    assert str(caught.value) == f"output folder {used} is not empty: {advice}"


def test_resume_returns_the_manifest_and_touches_nothing(used: OutputFolder) -> None:
    assert prepare_output_dir(used, OutputMode.RESUME) == MANIFEST
    assert used.names() == sorted([MANIFEST_NAME, *OURS])


def test_resume_wants_a_manifest(used: OutputFolder) -> None:
    used.remove([MANIFEST_NAME])
    with pytest.raises(OutputNotEmpty, match="no headrace job to resume"):
        prepare_output_dir(used, OutputMode.RESUME)


def test_overwrite_removes_what_headrace_wrote(used: OutputFolder) -> None:
    assert prepare_output_dir(used, OutputMode.OVERWRITE, MANIFEST.job_id) is None
    assert used.names() == []


def test_the_users_own_folder_stays(used: OutputFolder) -> None:
    for _ in range(2):
        remove_output_dir(used, keep_folder=True)
        assert used.names() == []
        assert used.exists()


def test_a_folder_goes_with_what_headrace_wrote(used: OutputFolder) -> None:
    for _ in range(2):
        remove_output_dir(used)
        assert used.names() == []
        assert not isinstance(used, LocalFolder) or not used.exists()


@pytest.mark.parametrize(
    "foreign", ["notes.txt", "part-1.parquet", "part-00000-01-000.parquet.bak", "part-0-1-0-x.parquet", ".hidden"]
)
def test_overwrite_touches_nothing_beside_foreign_files(used: OutputFolder, foreign: str) -> None:
    used.replace(foreign, b"")
    for remove in (lambda: prepare_output_dir(used, OutputMode.OVERWRITE), lambda: remove_output_dir(used)):
        with pytest.raises(OutputNotEmpty, match=f"holds {foreign}, not written by headrace"):
            remove()
        assert len(used.names()) == len(OURS) + 2


@pytest.mark.parametrize("mode", OutputMode)
def test_a_folder_without_a_job_and_with_foreign_files_is_no_output(mode: OutputMode, folder: OutputFolder) -> None:
    """Neither of the other modes would take it."""
    folder.make()
    folder.replace("notes.txt", b"")
    with pytest.raises(OutputNotEmpty, match=r"holds notes\.txt, not written by headrace: move it away or"):
        prepare_output_dir(folder, mode)
    assert folder.names() == ["notes.txt"]


@pytest.mark.parametrize("mode", OutputMode)
@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_file_in_the_way(mode: OutputMode, name: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="is not a folder"):
        prepare_output_dir(LocalFolder(tmp_path / name), mode)


def test_manifest_comes_back(folder: OutputFolder) -> None:
    assert read_manifest(folder) is None
    folder.make()
    assert read_manifest(folder) is None
    write_manifest(folder, MANIFEST)
    assert read_manifest(folder) == MANIFEST
    assert folder.names() == [MANIFEST_NAME]


def test_a_file_is_no_folder_with_a_manifest(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert read_manifest(LocalFolder(tmp_path / "file")) is None


def test_folder_is_taken_once(folder: OutputFolder) -> None:
    folder.make()
    write_manifest(folder, MANIFEST)
    with pytest.raises(OutputNotEmpty, match="taken by another job"):
        write_manifest(folder, Manifest("job-2", "abc"))
    assert read_manifest(folder) == MANIFEST


@pytest.mark.parametrize("replaced", [None, "job-2"])
def test_overwrite_touches_nothing_of_a_job_that_was_not_replaced(replaced: str | None, used: OutputFolder) -> None:
    names = used.names()
    with pytest.raises(OutputNotEmpty, match="taken by another job"):
        prepare_output_dir(used, OutputMode.OVERWRITE, replaced)
    assert used.names() == names


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"job_id": "x"}', b'{"job_id": "../x", "fingerprint": "y"}'])
def test_damaged_manifest(content: bytes, used: OutputFolder) -> None:
    used.replace(MANIFEST_NAME, content)
    with pytest.raises(ManifestDamaged, match='damaged: pass mode="overwrite"'):
        prepare_output_dir(used, OutputMode.RESUME)
    prepare_output_dir(used, OutputMode.OVERWRITE)


def test_a_completed_manifest_says_more_and_still_whose_it_is(folder: OutputFolder) -> None:
    folder.make()
    write_manifest(folder, MANIFEST)
    assert complete_manifest(folder, MANIFEST, lambda: {"rows": {"total": 3}})
    written = json.loads(folder.read(MANIFEST_NAME))
    assert written == {"job_id": "job-1", "fingerprint": "abc", "rows": {"total": 3}}
    assert read_manifest(folder) == MANIFEST
    complete_manifest(folder, MANIFEST, lambda: {"rows": {"total": 4}})
    assert json.loads(folder.read(MANIFEST_NAME))["rows"] == {"total": 4}
    assert folder.names() == [MANIFEST_NAME]


def test_the_manifest_of_another_job_is_left_alone(folder: OutputFolder) -> None:
    folder.make()
    assert not complete_manifest(folder, MANIFEST, lambda: {"rows": 1})
    assert folder.names() == []
    write_manifest(folder, Manifest("job-2", "abc"))
    assert complete_manifest(folder, MANIFEST, lambda: {"rows": 1})
    assert b"rows" not in folder.read(MANIFEST_NAME)


def test_a_manifest_says_which_ledger_knows_the_job(folder: OutputFolder) -> None:
    folder.make()
    write_manifest(folder, Manifest("job-1", "abc", "ledger-1"))
    # As the worker has it, which need not know that.
    complete_manifest(folder, MANIFEST, lambda: {"state": "completed"})
    found = read_manifest(folder)
    assert found is not None
    assert found.ledger == "ledger-1"


@pytest.fixture
def disk(tmp_path: Path) -> LocalFolder:
    write_manifest(LocalFolder(tmp_path), MANIFEST)
    return LocalFolder(tmp_path)


def test_while_one_completes_it_nobody_else_writes_or_removes_it(
    disk: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_file, "_PATIENCE_SECONDS", 0.0)

    def report() -> dict[str, int]:
        for call in (
            lambda: complete_manifest(disk, MANIFEST, lambda: {"rows": 1}),
            lambda: prepare_output_dir(disk, OutputMode.OVERWRITE, MANIFEST.job_id),
            lambda: remove_output_dir(disk),
        ):
            with pytest.raises(StorageError, match=f"{MANIFEST_NAME} is being written by another process: try again"):
                call()
        return {"rows": 2}

    complete_manifest(disk, MANIFEST, report)
    assert json.loads(disk.read(MANIFEST_NAME))["rows"] == 2
    complete_manifest(disk, MANIFEST, lambda: {"rows": 3})
    assert json.loads(disk.read(MANIFEST_NAME))["rows"] == 3


@pytest.mark.parametrize("by", [None, "job-2"])
def test_what_has_changed_before_it_is_held_is_seen(
    by: str | None, disk: LocalFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another job takes the folder between opening the manifest and locking it."""
    lock = held_file._is_locked

    def take_first(file: BinaryIO) -> bool:
        monkeypatch.setattr(held_file, "_is_locked", lock)
        disk.remove([MANIFEST_NAME])
        if by is not None:
            write_manifest(disk, Manifest(by, "abc"))
        return lock(file)

    monkeypatch.setattr(held_file, "_is_locked", take_first)
    assert complete_manifest(disk, MANIFEST, lambda: {"rows": 1}) == (by is not None)
    assert read_manifest(disk) == (Manifest(by, "abc") if by else None)


@pytest.mark.parametrize("by", [None, "job-2"])
def test_a_name_that_is_taken_away_before_it_has_content_is_not_ours(
    by: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one overwrites the folder when the manifest is there and still empty, as if it were damaged."""
    folder, lock = LocalFolder(tmp_path), held_file._is_locked

    def take_first(file: BinaryIO) -> bool:
        monkeypatch.setattr(held_file, "_is_locked", lock)
        prepare_output_dir(folder, OutputMode.OVERWRITE)
        if by is not None:
            write_manifest(folder, Manifest(by, "abc"))
        return lock(file)

    monkeypatch.setattr(held_file, "_is_locked", take_first)
    with pytest.raises(OutputNotEmpty, match="taken by another job"):
        write_manifest(folder, MANIFEST)
    assert read_manifest(folder) == (Manifest(by, "abc") if by else None)


def test_a_manifest_that_is_not_ours_to_write_can_still_be_held(disk: LocalFolder, tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).chmod(0o400)
    complete_manifest(disk, MANIFEST, lambda: {"rows": 1})
    assert b"rows" in disk.read(MANIFEST_NAME)


def test_a_full_disk_leaves_what_was_there(disk: LocalFolder, tmp_path: Path) -> None:
    # The device that is always full, in the place of the temporary file.
    (tmp_path / f".{MANIFEST_NAME}.tmp").symlink_to("/dev/full")
    with pytest.raises(StorageError, match="No space left"):
        complete_manifest(disk, MANIFEST, lambda: {"rows": 1})
    assert disk.names() == [MANIFEST_NAME]
    assert read_manifest(disk) == MANIFEST
    disk.remove([MANIFEST_NAME])
    (tmp_path / f".{MANIFEST_NAME}.tmp").symlink_to("/dev/full")
    with pytest.raises(StorageError, match="No space left"):
        write_manifest(disk, MANIFEST)
    assert disk.names() == []


def test_a_lock_is_gone_once_it_is_let_go_of_even_if_somebody_has_tidied_it_away(tmp_path: Path) -> None:
    path = tmp_path / "new" / "job.lock"
    with held_file.held_lock(path):
        assert path.exists()
    assert not path.exists()
    with held_file.held_lock(path):
        path.unlink()


def test_a_lock_that_its_holder_has_left_says_what_it_was_for(tmp_path: Path) -> None:
    path = tmp_path / "job.lock"
    with (
        held_file.held_lock(path, "ledger"),
        pytest.raises(BlockingIOError),
        held_file.abandoned_lock(path),
    ):
        pass
    path.write_text("ledger")
    with held_file.abandoned_lock(path) as mark:
        assert mark == "ledger"


def test_a_lock_that_cannot_be_removed_undoes_nothing_of_what_was_done_under_it(tmp_path: Path) -> None:
    path = tmp_path / "job.lock"
    with held_file.held_lock(path):
        path.unlink()
        path.mkdir()
    assert path.is_dir()
