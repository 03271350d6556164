"""Several files of one text format as one input."""

import hashlib
from collections.abc import Iterator, Sequence

from ..errors import InputError
from ..output.manifest import MANIFEST_NAME
from .location import Location
from .source import InputRow, InputSource


class Concatenated(InputSource):
    """The rows of several sources one after the other, numbered through; a bad row's error names its file."""

    def __init__(self, name: str, sources: Sequence[InputSource], limit: int | None) -> None:
        """Raises InputError when sources with fixed columns have different ones."""
        super().__init__(name, limit)
        self._sources = sources
        self.has_fixed_columns = all(source.has_fixed_columns for source in sources)
        if self.has_fixed_columns:
            self._refuse_drift()

    @property
    def files(self) -> Sequence[Location]:
        return [file for source in self._sources for file in source.files]

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(name for source in self._sources for name in source.columns))

    def fingerprint(self) -> str:
        return hashlib.sha256("".join(source.fingerprint() for source in self._sources).encode()).hexdigest()

    def _rows(self) -> Iterator[InputRow]:
        number = 0
        for source in self._sources:
            for row in source:
                error = None if row.error is None else f"{source.name}: {row.error}"
                yield row._replace(row=number, error=error)
                number += 1

    def _refuse_drift(self) -> None:
        """Columns are told by their names: each file may have them in an order of its own."""
        first, *others = self._sources
        for other in others:
            for having, lacking in ((first, other), (other, first)):
                if missing := [name for name in having.columns if name not in lacking.columns]:
                    raise InputError(
                        f"input {lacking.name} has no column {missing[0]!r}, which {having.name} has: give all files "
                        "the same columns"
                    )


def files_of_one_format(folder: Location, formats: Sequence[str]) -> list[Location]:
    """The files of a folder in a known format.

    Raises InputError when there is none, files of two formats, or more of them in a folder within.
    """
    children = folder.children()
    files = _described_by_json([child for child in children if child.format in formats])
    within = [child for child in children if child.format not in formats and child.is_folder()]
    if not files:
        names = ", ".join(child.file_name for child in within)
        hint = f"; folders within are not read, name one of {names}" if within else ""
        raise InputError(f"input folder {folder.name} has no file that ends in {', '.join(formats)}{hint}")
    found = sorted({file.format for file in files})
    if len(found) > 1:
        raise InputError(f"input folder {folder.name} has files of several formats ({', '.join(found)}): keep one")
    for other in within:
        if _has_rows(other, found[0]):
            raise InputError(
                f"input folder {folder.name} has {found[0]} files in its folder {other.file_name} too, which would not "
                "be read: put all into one folder, or make each folder a job"
            )
    return files


def _described_by_json(files: list[Location]) -> list[Location]:
    """Without `dataset_info.json`, `metadata.json` and their like: JSON beside another format describes it."""
    return [file for file in files if file.format != ".json"] or files


def _has_rows(folder: Location, format: str) -> bool:
    """Whether it has files of this format that are no data set of ours, such as the output of this very job."""
    children = folder.children()
    return any(child.format == format for child in children) and not folder.child(MANIFEST_NAME).exists()
