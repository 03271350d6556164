"""Answers of earlier jobs in the place of new ones: the same weights, prompt and sampling give the same answer."""

import hashlib
import json
import threading
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ...engine.hub import LocatedModel
from ...engine.request import Request
from ...storage.result_cache import ResultCache
from ..schemas import JobSpec
from .row_batch import RowBatch

# What an answer depends on, beside the weights: the tokenizer, the model's description.
_MODEL_FILES = ("*.json", "*.jinja", "*.safetensors")
# To be raised when answers or their columns change.
_VERSION = 1


class AnswerCache:
    """One a worker; thread-safe. Never raises for Redis' sake."""

    def __init__(self, cache: ResultCache, model: LocatedModel) -> None:
        self._cache = cache
        self._model = model
        self._reading = threading.Lock()

    def answer(self, batch: RowBatch, spec: JobSpec) -> dict[int, str]:
        """Answer what rows of `batch` can be; returns the keys of the others, by where they stand in the shard."""
        about_all = self._about_all(spec)
        keys = {index: _key(about_all, requests) for index, requests in batch.open_rows().items()}
        found = self._cache.get_many(list(dict.fromkeys(keys.values())))
        for index, key in keys.items():
            if key in found:
                batch.answer(index, _columns(found[key]))
        return {index: key for index, key in keys.items() if key not in found}

    def keep(self, answers: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep the columns of answers under their keys, but not errors."""
        good = {key: json.dumps(columns).encode() for key, columns in answers.items() if "error" not in columns}
        self._cache.put_many(good)

    def _about_all(self, spec: JobSpec) -> str:
        with self._reading:
            weights = self._weights
        return json.dumps([_VERSION, weights, spec.dtype, spec.quantization, spec.samples_each_row])

    @cached_property
    def _weights(self) -> str:
        """What is in a folder, which may be replaced; a Hugging Face model is named with its commit."""
        if not Path(self._model.name).is_absolute():
            return self._model.name
        return folder_identity(self._model.folder)


def folder_identity(folder: Path) -> str:
    """The same for folders with the same model, wherever they are. Reads all of the weights."""
    names = sorted(path.name for pattern in _MODEL_FILES for path in folder.glob(pattern))
    digest = hashlib.blake2b(digest_size=32)
    for name in names:
        with (folder / name).open("rb") as file:
            content = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
        digest.update(f"{name}\0{content}\n".encode())
    return digest.hexdigest()


def _key(about_all: str, requests: Sequence[Request]) -> str:
    first = requests[0]
    # What is drawn from a seed is all that depends on it.
    params = {name: value for name, value in vars(first.params).items() if name != "seed" or not first.params.is_greedy}
    sampling = json.dumps([len(requests), params], sort_keys=True, default=vars)
    digest = hashlib.blake2b(f"{about_all}\n{sampling}\n".encode(), digest_size=32)
    digest.update(array("I", first.prompt_token_ids).tobytes())
    return digest.hexdigest()


def _columns(value: bytes) -> dict[str, Any]:
    columns: dict[str, Any] = json.loads(value)
    # None of the prompt was computed.
    return columns | {"from_cache": True, "cached_tokens": columns["prompt_tokens"]}
