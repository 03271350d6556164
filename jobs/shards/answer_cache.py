"""Answers of earlier jobs in the place of new ones: the same weights, prompt and sampling give the same answer."""

import hashlib
import json
import logging
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from ...engine.request import Request
from ...storage.result_cache import ResultCache
from ..spec.schemas import JobSpec
from .row_batch import RowBatch
from .weights import ModelWeights

logger = logging.getLogger(__name__)

# To be raised when answers or their columns change.
_VERSION = 4


class AnswerCache:
    """One a worker; thread-safe. Never raises: it is empty without Redis, and without weights that can be read."""

    def __init__(self, cache: ResultCache, weights: ModelWeights) -> None:
        self._cache = cache
        self._weights = weights

    def answer(self, batch: RowBatch, spec: JobSpec, tenant: str) -> dict[int, str]:
        """Answer what rows of `batch` can be; returns the keys of the others, by where they stand in the shard.

        A tenant gets answers of its own jobs only: from another's it could learn what that has asked.
        """
        try:
            about_all = self._about_all(spec, tenant)
        except OSError as error:
            logger.warning("doing without the result cache, as the weights are not known: %s", error)
            return {}
        keys = {place: _key(about_all, requests) for place, requests in batch.open_rows().items()}
        found = self._cache.get_many(list(dict.fromkeys(keys.values())))
        batch.answer({place: _columns(found[key]) for place, key in keys.items() if key in found})
        return {place: key for place, key in keys.items() if key not in found}

    def keep(self, answers: Mapping[str, Mapping[str, Any]]) -> None:
        """Keep the columns of answers under their keys, but not errors."""
        good = {key: json.dumps(columns).encode() for key, columns in answers.items() if "error" not in columns}
        self._cache.put_many(good)

    def _about_all(self, spec: JobSpec, tenant: str) -> str:
        about = [_VERSION, tenant, self._weights.identity(spec.lora), *spec.precision, spec.samples_each_row]
        if spec.vote:
            about.append(spec.sampling.n)
        return json.dumps(about)


def _key(about_all: str, requests: Sequence[Request]) -> str:
    first = requests[0]
    # What is drawn from a seed is all that depends on it.
    params = {name: value for name, value in vars(first.params).items() if name != "seed" or not first.params.is_greedy}
    sampling = json.dumps([len(requests), params], sort_keys=True, default=vars)
    digest = hashlib.blake2b(f"{about_all}\n{sampling}\n".encode(), digest_size=32)
    digest.update(array("I", first.prompt_token_ids).tobytes())
    for image in first.images:
        digest.update(image.content_hash)
    return digest.hexdigest()


def _columns(value: bytes) -> dict[str, Any]:
    columns: dict[str, Any] = json.loads(value)
    # None of the prompt was computed.
    return columns | {"from_cache": True, "cached_tokens": columns["prompt_tokens"]}
