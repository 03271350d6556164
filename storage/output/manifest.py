"""The output folder: who may write into it, and the manifest that says which job it belongs to."""

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from ..errors import Argument, ManifestDamaged, OutputNotEmpty
from .folder import OutputFolder
from .parts import is_part

MANIFEST_NAME = "_headrace.json"
_TEMPORARY_MANIFEST = f".{MANIFEST_NAME}.tmp"
# It is the name of a folder too.
_JOB_ID = re.compile(r"[\w-]+")
_HIDDEN_PART = re.compile(r"\.(?P<part>.*)\.tmp")


class OutputMode(StrEnum):
    NEW = "new"
    RESUME = "resume"
    OVERWRITE = "overwrite"

    @property
    def argument(self) -> Argument:
        """How a caller passes it, as errors advise."""
        return Argument("mode", self.value)


@dataclass(frozen=True)
class Manifest:
    """The job that owns an output folder, and the fingerprint of what was asked for. The file may say more.

    `ledger`: the one that knows the job; None in files of before that was written down.
    """

    job_id: str
    fingerprint: str
    ledger: str | None = field(default=None, compare=False)


def prepare_output_dir(folder: OutputFolder, mode: OutputMode, replaced: str | None = None) -> Manifest | None:
    """Create the folder, or check that the mode may use it as it is; `overwrite` removes what headrace wrote.

    Returns the manifest of the job to resume, None when there is nothing to resume. Raises OutputNotEmpty,
    or StorageError when the folder cannot be created or written to. Before overwriting, cancel the job of
    `read_manifest`, lest a worker go on writing: that is the job `replaced`, whose folder may be taken.
    """
    folder.make()
    names = folder.names()
    if not names:
        return None
    # Beside a job's data set such files may lie, unless it is to be replaced.
    if mode is OutputMode.OVERWRITE or MANIFEST_NAME not in names:
        _expect_ours(folder, names)
    if mode is OutputMode.NEW:
        resume, overwrite = OutputMode.RESUME.argument, OutputMode.OVERWRITE.argument
        problem = f"output folder {folder} is not empty"
        raise OutputNotEmpty(problem, ": pass ", resume, " to finish it or ", overwrite, " to replace it")
    if mode is OutputMode.OVERWRITE:
        _clear(folder, names, lambda owner: _expect_owner(folder, owner, replaced))
        return None
    manifest = read_manifest(folder)
    if manifest is None:
        problem = f"output folder {folder} holds no headrace job to resume"
        overwrite = OutputMode.OVERWRITE.argument
        raise OutputNotEmpty(problem, ": choose an empty folder, or pass ", overwrite, " if its parts may go")
    return manifest


def remove_output_dir(folder: OutputFolder, keep_folder: bool = False) -> None:
    """Remove what headrace wrote, and the folder. Raises OutputNotEmpty when it holds anything else, StorageError."""
    _expect_ours(folder, names := folder.names())
    _clear(folder, names)
    if not keep_folder:
        folder.remove_folder()


def expect_removable(folder: OutputFolder) -> None:
    """Raises what `remove_output_dir` does, as far as it can be told before."""
    _expect_ours(folder, folder.names())


def write_manifest(folder: OutputFolder, manifest: Manifest) -> None:
    """Take the folder for a job, before the job is recorded. Raises OutputNotEmpty if it is taken."""
    try:
        # Of two runs that found the folder empty, one creates it.
        folder.create(MANIFEST_NAME, (json.dumps(_as_json(manifest)) + "\n").encode())
    except FileExistsError:
        raise _taken(folder) from None


def complete_manifest(folder: OutputFolder, manifest: Manifest, report: Callable[[], Mapping[str, Any]]) -> bool:
    """Add how the job went, asked while the file is held; at any moment it is whole, and of two writers the later is
    the one that knows more.

    Returns whether there is a manifest. One of another job is left alone. Raises ManifestDamaged, StorageError.
    """
    with folder.held(MANIFEST_NAME) as content:
        if content is None:
            return False
        if (found := _manifest_of(_parsed(folder, content))) == manifest:
            completed = json.dumps({**_as_json(found), **report()}, indent=2, ensure_ascii=False)
            folder.replace(MANIFEST_NAME, f"{completed}\n".encode())
    return True


def read_manifest(folder: OutputFolder) -> Manifest | None:
    """The folder's manifest, or None. Raises ManifestDamaged, StorageError when it cannot be read."""
    report = read_report(folder)
    return None if report is None else _manifest_of(report)


def read_report(folder: OutputFolder) -> dict[str, Any] | None:
    """All that the folder's manifest says, how the job went too once it has completed. Raises as `read_manifest`."""
    try:
        return _parsed(folder, folder.read(MANIFEST_NAME))
    except FileNotFoundError:
        return None


def owner_of(folder: OutputFolder) -> str | None:
    """The job whose data set is in the folder; None where there is none, or nobody can tell. Raises StorageError."""
    with suppress(ManifestDamaged):
        return None if (manifest := read_manifest(folder)) is None else manifest.job_id
    return None


def expect_owner(folder: OutputFolder, job_id: str | None) -> None:
    """Raises OutputNotEmpty where another job has taken the folder since `owner_of` said so, and StorageError."""
    with suppress(FileNotFoundError):
        _expect_owner(folder, folder.read(MANIFEST_NAME), job_id)


def belongs_to_another(folder: OutputFolder, job_id: str) -> bool:
    """Whether the folder's manifest names another job. Raises as `read_manifest`."""
    manifest = read_manifest(folder)
    return manifest is not None and manifest.job_id != job_id


def _parsed(folder: OutputFolder, content: bytes) -> dict[str, Any]:
    try:
        values: dict[str, Any] = json.loads(content)
        if not _JOB_ID.fullmatch(values["job_id"]):
            raise ValueError("the job's id is no name of a folder")
        return {"job_id": values["job_id"], "fingerprint": values["fingerprint"], **values}
    except (ValueError, TypeError, KeyError) as error:
        problem, overwrite = f"{folder}/{MANIFEST_NAME} is damaged", OutputMode.OVERWRITE.argument
        raise ManifestDamaged(problem, ": pass ", overwrite, " to replace the data set") from error


def _manifest_of(report: Mapping[str, Any]) -> Manifest:
    return Manifest(report["job_id"], report["fingerprint"], report.get("ledger"))


def _as_json(manifest: Manifest) -> dict[str, str]:
    return {name: value for name, value in asdict(manifest).items() if value is not None}


def _expect_ours(folder: OutputFolder, names: list[str]) -> None:
    foreign = [name for name in names if not _is_ours(name)]
    if foreign:
        advice = "move it away or choose another folder"
        raise OutputNotEmpty(f"output folder {folder} holds {foreign[0]}, not written by headrace: {advice}")


def _expect_owner(folder: OutputFolder, content: bytes | None, job_id: str | None) -> None:
    """Raises OutputNotEmpty where another job has taken the folder since; nobody's is what cannot be read."""
    with suppress(ManifestDamaged):
        if content is not None and _manifest_of(_parsed(folder, content)).job_id != job_id:
            raise _taken(folder)


def _taken(folder: OutputFolder) -> OutputNotEmpty:
    return OutputNotEmpty(f"output folder {folder} was taken by another job: choose another")


def _clear(
    folder: OutputFolder, names: list[str], check_manifest: Callable[[bytes | None], None] = lambda content: None
) -> None:
    # The manifest first: killed in the middle, what is left cannot be taken for a job to resume.
    with folder.held(MANIFEST_NAME) as content:
        check_manifest(content)
        folder.remove([name for name in names if name == MANIFEST_NAME])
    folder.remove([name for name in names if name != MANIFEST_NAME])


def _is_ours(name: str) -> bool:
    hidden = _HIDDEN_PART.fullmatch(name)
    return name in (MANIFEST_NAME, _TEMPORARY_MANIFEST) or is_part(hidden["part"] if hidden else name)
