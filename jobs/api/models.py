"""Which models a request may name: those the operator has listed, never a path of the client's choice."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ...engine.checkpoints.hub import locate_model, public_name
from ..celery_app import live_queue, shard_queue
from ..errors import SpecError
from ..live.prompt import LivePrompts
from ..precision import Precision
from .errors import ApiError


@dataclass(frozen=True)
class ServedModel:
    """A model by the `name` that clients use, and by what `headrace worker` and the queues call it.

    `precision`: what its workers were started with; requests that name none go to these.
    """

    name: str
    exact_name: str
    precision: Precision

    @property
    def live_queue(self) -> str:
        return live_queue(self.exact_name, *self.precision)

    @property
    def shard_queue(self) -> str:
        """The queue by which its workers' presence is known."""
        return shard_queue(self.exact_name, *self.precision)

    @property
    def worker_options(self) -> list[str]:
        """What its workers are started with, beside the model."""
        return self.precision.worker_options

    @property
    def prompts(self) -> LivePrompts:
        return LivePrompts.of(self.exact_name)


class ServedModels:
    """The models by the names that requests may use: of a folder its last part, of a Hugging Face model its id."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self._models = models
        # Unix seconds: since when they are served here.
        self.created = int(time.time())

    @classmethod
    def of(
        cls, models: Sequence[str], dtype: str = "auto", quantization: str | None = None, kv_cache_dtype: str = "auto"
    ) -> Self:
        """Check the models and name them; the rest is their workers' precision.

        Raises `ModelError`, `ConfigError`, or `SpecError` when two have the same name.
        """
        precision = Precision(dtype, quantization, kv_cache_dtype)
        precision.check()
        exact_names: dict[str, str] = {}
        for model in models:
            located = locate_model(model, with_weights=False)
            # Also has its tokenizer ready for the first request.
            LivePrompts.of(located.name)
            name = public_name(located.name)
            if (other := exact_names.setdefault(name, located.name)) != located.name:
                raise SpecError(f"--model {located.name} and {other} share a name: link one under another")
        return cls([ServedModel(*names, precision) for names in exact_names.items()])

    @property
    def all(self) -> Sequence[ServedModel]:
        return self._models

    def model(self, model: str) -> ServedModel:
        """A model by its name or its exact name. Raises `ApiError` (404)."""
        for served in self._models:
            if model in (served.name, served.exact_name):
                return served
        known = ", ".join(served.name for served in self._models)
        raise ApiError(404, f"model {model!r} is not served here: use {known}", "model_not_found", "model")

    def exact_name(self, model: str) -> str:
        """What the queues call a model that a client names. Raises `ApiError` (404)."""
        return self.model(model).exact_name
