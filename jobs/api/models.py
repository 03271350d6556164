"""Which models a request may name: those the operator has listed, never a path of the client's choice."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from ...engine.config import ModelConfig
from ...engine.tokenizer import Tokenizer
from ..errors import SpecError
from .errors import ApiError


class ServedModels:
    """The models by name, each a folder; a name is the folder's last part."""

    def __init__(self, folders: dict[str, Path]) -> None:
        self._folders = folders

    @classmethod
    def of(cls, paths: Sequence[str]) -> Self:
        """Check the folders and name them. Raises `ModelError`, or `SpecError` when two have the same name."""
        folders: dict[str, Path] = {}
        for path in paths:
            # As `headrace worker` has it: the queue is named after this path.
            folder = Path(path).expanduser().absolute()
            ModelConfig.from_pretrained(folder)
            Tokenizer.from_pretrained(folder)
            if folders.setdefault(folder.name, folder) != folder:
                raise SpecError(f"--model {folder} and {folders[folder.name]} share a name: link one under another")
        return cls(folders)

    def folder(self, model: str) -> Path:
        """The folder of a model by its name or by that folder's path. Raises `ApiError` (404)."""
        for name, folder in self._folders.items():
            if model in (name, str(folder)):
                return folder
        known = ", ".join(self._folders)
        raise ApiError(404, f"model {model!r} is not served here: use {known}", "model_not_found", "model")
