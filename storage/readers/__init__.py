"""Any input as a stream of rows. A bad row is an error row with its line; a bad input raises InputError."""

import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path

from ..errors import Argument, InputError
from .arrow import Parquet, SavedDataset
from .csv_lines import TABS_FIRST, Csv
from .folder import Concatenated, files_of_one_format
from .json_array import JsonArray, is_json_array
from .json_lines import JsonLines, are_columns
from .location import Location
from .readable import is_unicode, readable
from .source import InputRow, InputSource
from .sql import SqlQuery
from .text import not_utf8


def _open_json(location: Location, limit: int | None) -> InputSource:
    """Both kinds of text go by this name: one array of objects, and an object a line."""
    return JsonArray(location, limit) if is_json_array(location) else JsonLines(location, limit)


def _open_tsv(location: Location, limit: int | None) -> InputSource:
    return Csv(location, limit, TABS_FIRST)


_TEXT_FORMATS: dict[str, Callable[[Location, int | None], InputSource]] = {
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".json": _open_json,
    ".csv": Csv,
    ".tsv": _open_tsv,
}
# Extensions of files that can be read, a compression's not among them.
FORMATS = (*_TEXT_FORMATS, ".parquet")


def open_input(address: str | Path, limit: int | None = None, name: str | None = None) -> InputSource:
    """The input at a path or URL by its extension, of its first `limit` rows. Raises InputError, in one line.

    `name`: what the user calls it, where that is not the address; errors do not tell where it lies then.

    A file (.jsonl, .ndjson, .json, .csv or .tsv, also with .gz or .zst after it; .parquet), a folder of such files,
    or a folder that Hugging Face's `datasets` saved; ~ is the home folder. The header and the first row are read, so
    that what is empty or unreadable is refused here.
    """
    if not str(address):
        raise InputError("input is empty: name a file or a folder")
    location = Location(os.path.expanduser(address), name)
    if not location.exists():
        raise InputError(f"input {location.name} does not exist: check the path")
    with readable(location.name):
        source = _open_folder(location, limit) if location.is_folder() else _open_file(location, limit)
    return _checked(source, limit)


def open_sql(url: str, query: str, limit: int | None = None) -> InputSource:
    """The rows that a query returns. Raises InputError, in one line."""
    return _checked(SqlQuery(url, query, limit), limit)


def _checked(source: InputSource, limit: int | None) -> InputSource:
    if limit is not None and limit < 1:
        raise InputError(Argument("limit"), f" {limit} leaves no rows: pass 1 or more")
    if (first := next(iter(source), None)) is None:
        raise InputError(f"input {source.name} has no rows: give it at least one")
    if are_columns(first.values) and limit != 1 and len([*islice(source, 2)]) == 1:
        raise InputError(
            f"input {source.name} has columns, not rows: write an object a row, as pandas does with "
            'to_json(…, orient="records", lines=True)'
        )
    return source


def _open_file(location: Location, limit: int | None) -> InputSource:
    if location.is_stream():
        raise InputError(
            f"input {location.name} is a pipe or a device, and inputs are read several times: write it into a file "
            "first, or pipe it into `headrace run -`"
        )
    if location.format == ".parquet":
        return Parquet(location.name, [location], limit)
    if location.format not in _TEXT_FORMATS:
        kind = f"the format {location.format!r}" if location.format else "a file without an extension"
        raise InputError(
            f"input {location.name}: {kind} is not known: use {', '.join(_TEXT_FORMATS)} (also with .gz or .zst) "
            "or .parquet"
        )
    return _TEXT_FORMATS[location.format](location, limit)


def _open_folder(folder: Location, limit: int | None) -> InputSource:
    children = folder.children()
    names = {child.file_name for child in children}
    if "dataset_dict.json" in names:
        splits = ", ".join(child.name for child in children if child.is_folder())
        raise InputError(f"input {folder.name} is a data set of several splits: name one of {splits}")
    if {"state.json", "dataset_info.json"} <= names:
        return SavedDataset(folder, limit)
    files = files_of_one_format(folder, FORMATS)
    if files[0].format == ".parquet":
        return Parquet(folder.name, files, limit)
    return Concatenated(folder.name, [_open_file(file, None) for file in files], limit)


__all__ = ["FORMATS", "InputRow", "InputSource", "is_unicode", "not_utf8", "open_input", "open_sql", "readable"]
