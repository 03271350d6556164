"""The output folder: who may write into it, and the manifest that says which job it belongs to."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from .errors import ManifestDamaged, OutputNotEmpty, StorageError
from .files import sync_folder

MANIFEST_NAME = "_headrace.json"
_TEMPORARY_MANIFEST = f".{MANIFEST_NAME}.tmp"
# A path has lost one of the two slashes.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")
_PART_NAME = re.compile(r"part-\d+-\d+-\d+\.parquet|\.part-\d+-\d+-\d+\.parquet\.tmp")


class OutputMode(StrEnum):
    NEW = "new"
    RESUME = "resume"
    OVERWRITE = "overwrite"


@dataclass(frozen=True)
class Manifest:
    """The job that owns an output folder, and the fingerprint of what was asked for. The file may say more."""

    job_id: str
    fingerprint: str


def local_folder(address: str | Path) -> Path:
    """The absolute path of an output folder. Raises StorageError for a URL, whose store has no renames to commit by."""
    if _URL.match(str(address)):
        raise StorageError(f"output {address} is a URL, and data sets are written to folders: name one, copy it later")
    return Path(address).absolute()


def prepare_output_dir(folder: Path, mode: OutputMode) -> Manifest | None:
    """Create the folder, or check that the mode may use it as it is; `overwrite` removes what headrace wrote.

    Returns the manifest of the job to resume, None when there is nothing to resume. Raises OutputNotEmpty,
    or StorageError when the folder cannot be created. Before overwriting, cancel the job of
    `read_manifest`, lest a worker go on writing.
    """
    names = _make(folder)
    if not names:
        return None
    if mode is OutputMode.NEW:
        advice = "pass --resume to finish it or --overwrite to replace it"
        raise OutputNotEmpty(f"output folder {folder} is not empty: {advice}")
    if mode is OutputMode.OVERWRITE:
        _clear(folder, names)
        return None
    manifest = read_manifest(folder)
    if manifest is None:
        advice = "choose an empty folder, or --overwrite if its parts may go"
        raise OutputNotEmpty(f"output folder {folder} holds no headrace job to resume: {advice}")
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Take the folder for a job, before the job is recorded. Raises OutputNotEmpty if it is taken."""
    path = folder / MANIFEST_NAME
    try:
        # Of two runs that found the folder empty, one creates the name; the content then comes in whole.
        path.open("x").close()
        _write_atomically(path, json.dumps(asdict(manifest)) + "\n")
    except FileExistsError:
        raise OutputNotEmpty(f"output folder {folder} was taken by another job: choose another") from None
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def complete_manifest(folder: Path, manifest: Manifest, report: Mapping[str, Any]) -> None:
    """Add how the job went; at any moment the file is whole. Does nothing when the folder is another job's.

    Raises StorageError.
    """
    if read_manifest(folder) != manifest:
        return
    path = folder / MANIFEST_NAME
    try:
        _write_atomically(path, json.dumps({**asdict(manifest), **report}, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise StorageError(f"cannot write {path}: {error.strerror}") from error


def read_manifest(folder: Path) -> Manifest | None:
    """The folder's manifest, or None. Raises ManifestDamaged, StorageError when it cannot be read."""
    report = read_report(folder)
    return None if report is None else Manifest(report["job_id"], report["fingerprint"])


def read_report(folder: Path) -> dict[str, Any] | None:
    """All that the folder's manifest says, how the job went too once it has completed. Raises as `read_manifest`."""
    path = folder / MANIFEST_NAME
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        return {"job_id": values["job_id"], "fingerprint": values["fingerprint"], **values}
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise ManifestDamaged(f"{path} is damaged: pass --overwrite to replace the data set") from error


def _make(folder: Path) -> list[str]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return sorted(os.listdir(folder))
    except (FileExistsError, NotADirectoryError) as error:
        raise StorageError(f"output {folder} is not a folder: choose another") from error
    except OSError as error:
        raise StorageError(f"cannot use output folder {folder}: {error.strerror}") from error


def _clear(folder: Path, names: list[str]) -> None:
    foreign = [name for name in names if not _is_ours(name)]
    if foreign:
        advice = "move it away or choose another folder"
        raise OutputNotEmpty(f"output folder {folder} holds {foreign[0]}, not written by headrace: {advice}")
    # The manifest first: killed in the middle, what is left cannot be taken for a job to resume.
    for name in sorted(names, key=lambda name: name != MANIFEST_NAME):
        (folder / name).unlink(missing_ok=True)
    sync_folder(folder)


def _is_ours(name: str) -> bool:
    return name in (MANIFEST_NAME, _TEMPORARY_MANIFEST) or _PART_NAME.fullmatch(name) is not None


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(_TEMPORARY_MANIFEST)
    with temporary.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_folder(path.parent)
