"""Which models a request may name: those the operator has listed, never a path of the client's choice."""

from collections.abc import Sequence
from typing import Self

from ...engine.hub import locate_model, public_name
from ...engine.model_config import ModelConfig
from ...engine.tokenizer import Tokenizer
from ..errors import SpecError
from .errors import ApiError


class ServedModels:
    """The models by the names that requests may use: of a folder its last part, of a Hugging Face model its id."""

    def __init__(self, exact_names: dict[str, str]) -> None:
        """`exact_names`: for each, what `headrace worker` and the queues call it (see `locate_model`)."""
        self._exact_names = exact_names

    @classmethod
    def of(cls, models: Sequence[str]) -> Self:
        """Check the models and name them. Raises `ModelError`, or `SpecError` when two have the same name."""
        exact_names: dict[str, str] = {}
        for model in models:
            located = locate_model(model, with_weights=False)
            ModelConfig.from_pretrained(located.folder)
            Tokenizer.from_pretrained(located.folder)
            name = public_name(located.name)
            if (other := exact_names.setdefault(name, located.name)) != located.name:
                raise SpecError(f"--model {located.name} and {other} share a name: link one under another")
        return cls(exact_names)

    def exact_name(self, model: str) -> str:
        """A model by its name or its exact name. Raises `ApiError` (404)."""
        for name, exact_name in self._exact_names.items():
            if model in (name, exact_name):
                return exact_name
        known = ", ".join(self._exact_names)
        raise ApiError(404, f"model {model!r} is not served here: use {known}", "model_not_found", "model")
