"""Which models a request may name: those the operator has listed, never a path of the client's choice."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from ...engine.hub import locate_model, public_name
from ..celery_app import live_queue, shard_queue
from ..errors import SpecError
from ..live.prompt import LivePrompts
from .errors import ApiError

# Interactive requests go to workers that were started without --dtype and --quantization.
_DTYPE = "auto"


@dataclass(frozen=True)
class ServedModel:
    """A model by the `name` that clients use, and by what `headrace worker` and the queues call it."""

    name: str
    exact_name: str

    @property
    def live_queue(self) -> str:
        return live_queue(self.exact_name, _DTYPE)

    @property
    def shard_queue(self) -> str:
        """The queue by which its workers' presence is known."""
        return shard_queue(self.exact_name, _DTYPE)

    @property
    def prompts(self) -> LivePrompts:
        return LivePrompts.of(self.exact_name)


class ServedModels:
    """The models by the names that requests may use: of a folder its last part, of a Hugging Face model its id."""

    def __init__(self, exact_names: dict[str, str]) -> None:
        """`exact_names`: for each, what `headrace worker` and the queues call it (see `locate_model`)."""
        self._models = [ServedModel(name, exact_name) for name, exact_name in exact_names.items()]
        # Unix seconds: since when they are served here.
        self.created = int(time.time())

    @classmethod
    def of(cls, models: Sequence[str]) -> Self:
        """Check the models and name them. Raises `ModelError`, or `SpecError` when two have the same name."""
        exact_names: dict[str, str] = {}
        for model in models:
            located = locate_model(model, with_weights=False)
            # Also has its tokenizer ready for the first request.
            LivePrompts.of(located.name)
            name = public_name(located.name)
            if (other := exact_names.setdefault(name, located.name)) != located.name:
                raise SpecError(f"--model {located.name} and {other} share a name: link one under another")
        return cls(exact_names)

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
