"""A GGUF file: its metadata, and where its tensors are. Free of torch.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ...errors import ModelError
from ..git_lfs import damage
from .block_types import BLOCK_TYPES, TYPE_NAMES, BlockType

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
# By their number in the format: the numbers, then what is not one.
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is: from byte `offset` of `file` on. `shape`: outermost dimension first, as torch has it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    type: BlockType
    offset: int

    @property
    def num_rows(self) -> int:
        """Of `row_bytes` each: all dimensions but the innermost."""
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        return rows

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.num_weights * self.type.num_bytes

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes


@dataclass(frozen=True)
class GgufModel:
    """What all parts of a model say together: the metadata is the first one's."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @classmethod
    def open(cls, path: Path) -> "GgufModel":
        """Read all but the weights, of `path` and of the parts that it is split into.

        Raises `ModelError` where a file is no GGUF file, is not whole, or has tensors of an unsupported type.
        """
        read = [_read(file) for file in parts_of(path)]
        tensors = {name: info for _, infos in read for name, info in infos.items()}
        return cls(path, read[0][0], tensors)


def parts_of(path: Path) -> list[Path]:
    """The file itself, or all that a model is split into where it is one of them. Raises `ModelError`."""
    match = _PART.fullmatch(path.name)
    if match is None or (count := int(match["count"])) < 1:
        return [path]
    files = [path.with_name(f"{match['stem']}-{number:05}-of-{count:05}{SUFFIX}") for number in range(1, count + 1)]
    for file in files:
        if not file.is_file():
            raise ModelError(f"{path.parent} has no {file.name}: the model is split into {count} files")
    return files


def is_gguf(path: Path) -> bool:
    return path.suffix == SUFFIX


def gguf_in(folder: Path) -> Path | None:
    """The GGUF file of a folder, the first where it is split; None in a folder that has safetensors, or no GGUF.

    Raises `ModelError` where there are several models.
    """
    if not folder.is_dir() or any(folder.glob("*.safetensors")):
        return None
    return the_model(sorted(folder.glob(f"*{SUFFIX}")), str(folder))


def the_model(files: Sequence[Path], where: str) -> Path | None:
    """The one model among these, as its first file; None where there is none. Raises `ModelError` for several."""
    # Beside a model that reads images llama.cpp's users have its vision tower, in a file of its own.
    models = [file for file in files if _is_first(file) and not file.name.startswith("mmproj")]
    if len(models) > 1:
        raise ModelError(f"{where} holds several models, {', '.join(file.name for file in models)}: name one of them")
    return models[0] if models else None


def _is_first(file: Path) -> bool:
    match = _PART.fullmatch(file.name)
    return match is None or int(match["number"]) == 1


def _read(file: Path) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    try:
        status = file.stat()
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror or error}") from error
    return _read_as_it_is(file, (status.st_ino, status.st_size, status.st_mtime_ns))


# A vocabulary is 300,000 texts, and configuration, weights and tokenizer each ask for what they need of the same file.
@lru_cache(maxsize=4)
def _read_as_it_is(file: Path, _is_still: tuple[int, int, int]) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    return _Reader(file).read()


class _Reader:
    """Reads one file from its beginning to where the weights begin."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        try:
            with self._file.open("rb") as stream:
                self._require_magic(stream.read(len(_MAGIC)))
                with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as self._content:
                    return self._read()
        except OSError as error:
            raise ModelError(f"{self._file} cannot be read: {error.strerror or error}") from error
        except (struct.error, UnicodeDecodeError, IndexError) as error:
            raise ModelError(f"{self._file} is damaged or truncated: its header is not whole ({error})") from error

    def _require_magic(self, found: bytes) -> None:
        if found != _MAGIC:
            problem = damage(self._file, f"is not a GGUF file: it begins with {found!r}")
            raise ModelError(f"{self._file} {problem}")

    def _read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        self._at = len(_MAGIC)
        if (version := self._number("I")) not in _VERSIONS:
            raise ModelError(f"{self._file} has version {version} of the GGUF format; supported: 2, 3 (little-endian)")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        metadata = {self._string(): self._value(self._number("I")) for _ in range(num_values)}
        found = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ModelError(f"{self._file} has general.alignment {alignment!r}, which is no number of bytes")
        start = self._at + -self._at % alignment
        infos = {name: TensorInfo(self._file, name, shape, kind, start + at) for name, shape, kind, at in found}
        for info in infos.values():
            if info.offset + info.num_bytes > len(self._content):
                raise ModelError(f"{self._file} is truncated: it ends within the tensor {info.name}, or before it")
        return metadata, infos

    def _tensor(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        name = self._string()
        shape = self._numbers("Q", self._number("I"))[::-1] or (1,)
        number = self._number("I")
        if (kind := BLOCK_TYPES.get(number)) is None:
            supported = ", ".join(each.name for each in BLOCK_TYPES.values())
            found = TYPE_NAMES.get(number, f"number {number}")
            raise ModelError(f"{self._file}: tensor {name} has the type {found}; supported: {supported}")
        if 0 in shape or shape[-1] % kind.num_weights:
            raise ModelError(f"{self._file}: tensor {name} has rows of {shape[-1]}, which {kind.name} cannot have")
        return name, shape, kind, self._number("Q")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind != _ARRAY:
            raise ModelError(f"{self._file} is damaged: its metadata has a value of the unknown kind {kind}")
        kind, length = self._number("I"), self._number("Q")
        if kind == _ARRAY:
            raise ModelError(f"{self._file} has a list of lists in its metadata, which no model has")
        if kind in _NUMBERS:
            return list(self._numbers(_NUMBERS[kind], length))
        if kind == _STRING:
            return self._strings(length)
        raise ModelError(f"{self._file} is damaged: its metadata has values of the unknown kind {kind}")

    def _string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> list[str]:
        content, at, end, found = self._content, self._at, len(self._content), []
        for _ in range(count):
            begin = at + _LENGTH.size
            at = begin + _LENGTH.unpack_from(content, at)[0]
            if at > end:
                raise IndexError(f"a text of {at - begin} bytes at {begin}")
            found.append(content[begin:at].decode())
        self._at = at
        return found

    def _number(self, code: str) -> Any:
        return self._numbers(code, 1)[0]

    def _numbers(self, code: str, count: int) -> tuple[Any, ...]:
        width = struct.calcsize(f"<{code}")
        if self._at + width * count > len(self._content):
            raise IndexError(f"{count} numbers at {self._at}")
        values = struct.unpack_from(f"<{count}{code}", self._content, self._at)
        self._at += width * count
        return values
