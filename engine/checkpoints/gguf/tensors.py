"""GGUF's weights as tensors, one at a time."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...errors import ModelError
from .blocks import dequantized
from .file import GgufModel
from .names import checkpoint_tensors
from .sources import Source


class GgufTensors:
    """The tensors of a GGUF model, by a checkpoint's names."""

    def __init__(self, path: Path) -> None:
        """Raises `ModelError`."""
        self._sources = checkpoint_tensors(GgufModel.open(path))

    def keys(self) -> list[str]:
        return list(self._sources)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor as numbers of `dtype`, or where that is uint8 its blocks: [rows, blocks of a row, bytes of a block].

        Raises `ModelError` when the file cannot be read any more, or its metadata speak of another shape.
        """
        source = self._sources[name]
        if not source.is_consistent:
            info = source.info
            raise ModelError(f"{info.file}: tensor {info.name} has the shape {info.shape}, and not as the metadata say")
        rows, kind = self._rows(source), source.info.type
        if dtype == torch.uint8:
            return _in_groups(rows, source).view(len(rows), -1, kind.num_bytes)
        shape = source.info.shape if source.expert is None else source.info.shape[1:]
        numbers = _in_groups(dequantized(rows, kind, dtype), source).view(-1, *shape[1:])
        return numbers if source.restored is None else source.restored(numbers)

    def _rows(self, source: Source) -> Tensor:
        """[rows, bytes of a row]: what is asked for of a tensor, in the order of a checkpoint's outputs."""
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
        if source.rows is None:
            return rows
        # Of a bias an output is a number, of a matrix it is a row.
        outputs = rows.view(info.shape[0], -1) if num_rows == 1 else rows
        return outputs[torch.from_numpy(source.rows)].reshape(-1, info.row_bytes)


def _in_groups(rows: Tensor, source: Source) -> Tensor:
    """rows: [out, inputs or their bytes], in the order of a checkpoint's inputs."""
    if source.groups is None:
        return rows
    return rows.view(len(rows), len(source.groups), -1)[:, torch.from_numpy(source.groups)].reshape(rows.shape)
