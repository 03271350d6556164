"""Which weights a worker answers with: the receipt by which answers can be made again, or taken for others'."""

import hashlib
import threading
from concurrent.futures import Future
from pathlib import Path

from ..engine.checkpoints.hub import LocatedModel

# What an answer depends on, beside the weights: the tokenizer, the model's description.
_MODEL_FILES = ("*.json", "*.jinja", "*.safetensors")


class ModelWeights:
    """One a worker; thread-safe. Files are read in a thread of its own, as those of a large model take a while."""

    def __init__(self, model: LocatedModel) -> None:
        self._identity: Future[str] = Future()
        threading.Thread(target=self._identify, args=(model,), name="weights", daemon=True).start()

    def identity(self) -> str:
        """What tells these weights from others, wherever they lie; waits until it is known. Raises OSError."""
        return self._identity.result()

    def _identify(self, model: LocatedModel) -> None:
        # A Hugging Face model is named with its commit; what is in a folder may be replaced.
        if not Path(model.name).is_absolute():
            self._identity.set_result(model.name)
            return
        try:
            self._identity.set_result(folder_identity(model.folder))
        except OSError as error:
            self._identity.set_exception(error)


def folder_identity(folder: Path) -> str:
    """The same for folders with the same model, wherever they are. Reads all of the weights."""
    names = sorted(path.name for pattern in _MODEL_FILES for path in folder.glob(pattern))
    digest = hashlib.blake2b(digest_size=32)
    for name in names:
        with (folder / name).open("rb") as file:
            content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
        digest.update(f"{name}\0{content}\n".encode())
    return f"blake2b:{digest.hexdigest()}"
