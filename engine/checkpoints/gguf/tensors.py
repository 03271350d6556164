"""GGUF's weights as tensors, one at a time."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...errors import ModelError
from .blocks import dequantized
from .file import GgufModel
from .names import Source, checkpoint_tensors


class GgufTensors:
    """The tensors of a GGUF model, by a checkpoint's names."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelError`."""
        self._sources = checkpoint_tensors(GgufModel.open(path))

    def keys(self) -> list[str]:
        return list(self._sources)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor as numbers of `dtype`, or where that is uint8 its blocks: [rows, blocks of a row, bytes of a block].

        Raises `ModelError` when the file cannot be read any more.
        """
        source = self._sources[name]
        rows = self._rows(source)
        if dtype == torch.uint8:
            return rows.view(len(rows), -1, source.info.type.num_bytes)
        shape = source.info.shape if source.expert is None else source.info.shape[1:]
        numbers = dequantized(rows, source.info.type, dtype).view(shape)
        return numbers - source.offset if source.offset else numbers

    def _rows(self, source: Source) -> Tensor:
        info = source.info
        num_rows, begin = info.num_rows, info.offset
        if source.expert is not None:
            num_rows //= info.shape[0]
            begin += source.expert * num_rows * info.row_bytes
        try:
            content = np.fromfile(info.file, np.uint8, num_rows * info.row_bytes, offset=begin)
        except OSError as error:
            raise ModelError(f"{info.file} cannot be read: {error.strerror}") from error
        rows = torch.from_numpy(content.reshape(num_rows, info.row_bytes))
        if source.interleaved_heads is None:
            return rows
        # Of a bias, which is one row, an output is a number; of a weight it is a row.
        return _in_halves(rows.view(info.shape[0], -1), source.interleaved_heads).reshape(rows.shape)


def _in_halves(rows: Tensor, heads: int) -> Tensor:
    """A projection's outputs in the order that rotates halves of a head. rows: [out, bytes of an output]."""
    return rows.view(heads, -1, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)
