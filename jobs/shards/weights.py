"""Which weights a worker answers with: the receipt by which answers can be made again, or taken for others'."""

import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from ...engine.checkpoints.gguf.file import is_gguf, parts_of
from ...engine.checkpoints.hub import LocatedModel
from ...engine.checkpoints.model_folder import TEMPLATES_FOLDER
from ...engine.errors import ModelError
from ...engine.lora.adapter_folder import adapter_identity
from ..spec.lora import LoraModule

# What an answer depends on, beside the weights: the tokenizer, the model's description.
_TEMPLATES = f"{TEMPLATES_FOLDER}/*.jinja"
_MODEL_FILES = ("*.json", "*.jinja", _TEMPLATES, "*.safetensors")
_BESIDE_GGUF = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", _TEMPLATES)


class ModelWeights:
    """One a worker; thread-safe. Files are read in a thread of its own, as those of a large model take a while."""

    def __init__(self, model: LocatedModel) -> None:
        self._model = model
        self._adapters: dict[str, str] = {}
        self._reading = threading.Lock()
        self._identity = self._read()

    def identity(self, lora: LoraModule | None = None) -> str:
        """What tells these weights from others, wherever they lie; waits until it is known.

        With an adapter they are others. One is read once: a worker refuses it when it has changed. Raises OSError where
        the files cannot be read; the next call reads them again.
        """
        with self._reading:
            if self._identity.done() and self._identity.exception() is not None:
                self._identity = self._read()
            if lora is not None and lora.path not in self._adapters:
                self._adapters[lora.path] = adapter_identity(Path(lora.path))
            identity = self._identity
        return identity.result() + (f"+lora:{self._adapters[lora.path]}" if lora is not None else "")

    def _read(self) -> "Future[str]":
        identity: Future[str] = Future()
        threading.Thread(target=_identify, args=(self._model, identity), name="weights", daemon=True).start()
        return identity


def _identify(model: LocatedModel, identity: "Future[str]") -> None:
    # A Hugging Face model is named with its commit; what is in a folder may be replaced.
    if not Path(model.name).is_absolute():
        identity.set_result(model.name)
        return
    try:
        identity.set_result((gguf_identity if is_gguf(model.folder) else folder_identity)(model.folder))
    except OSError as error:
        identity.set_exception(error)
    except ModelError as error:
        # A part of the file has gone since it was loaded.
        identity.set_exception(FileNotFoundError(str(error)))


def folder_identity(folder: Path) -> str:
    """The same for folders with the same model, wherever they are. Reads all of the weights."""
    return _identity(folder, _files(folder, _MODEL_FILES))


def gguf_identity(model: Path) -> str:
    """As `folder_identity`, of a GGUF file, or all its parts, and those beside it that are read with it."""
    parts = [file.name for file in parts_of(model)]
    return _identity(model.parent, [*parts, *_files(model.parent, _BESIDE_GGUF)])


def _files(folder: Path, patterns: Sequence[str]) -> list[str]:
    return [path.relative_to(folder).as_posix() for pattern in patterns for path in folder.glob(pattern)]


def _identity(folder: Path, names: list[str]) -> str:
    digest = hashlib.blake2b(digest_size=32)
    for name in sorted(names):
        with (folder / name).open("rb") as file:
            content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
        digest.update(f"{name}\0{content}\n".encode())
    return f"blake2b:{digest.hexdigest()}"
