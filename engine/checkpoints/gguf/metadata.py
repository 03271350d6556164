"""A GGUF file's metadata by the names that they have within its architecture. Free of torch."""

from collections.abc import Mapping
from typing import Any

from ...errors import ModelError
from .file import GgufModel
from .names import num_layers

# A field of ours: gates, ups and each expert are matrices by themselves, of a family whose checkpoints join them.
HAS_PARTS_APART = "has_parts_apart"


class Fields:
    """A model's metadata, its architecture's fields by their names without it."""

    def __init__(self, model: GgufModel, architecture: str) -> None:
        self.model = model
        self.architecture = architecture

    def __getitem__(self, name: str) -> Any:
        return self.model.metadata[f"{self.architecture}.{name}"]

    def get(self, name: str, default: Any = None) -> Any:
        return self.model.metadata.get(f"{self.architecture}.{name}", default)

    def alike(self, name: str, default: Any = None) -> int:
        """A number that may be given for each layer, as 0 of those that have none of it.

        Raises `ModelError` where the others differ.
        """
        value = self[name] if default is None else self.get(name, default)
        if not isinstance(value, list):
            return int(value)
        found = set(value) - {0} or {0}
        if len(found) != 1:
            raise ModelError(f"{self.model.path}: {self.architecture}.{name} differs between layers: {value}")
        return int(found.pop())

    def has(self, tensor: str) -> bool:
        return tensor in self.model.tensors

    def kinds(self, kind_of: Mapping[str, str]) -> list[str]:
        """Each layer's kind: that of the first of these matrices that it has. Raises `ModelError` where it has none."""
        layers = range(num_layers(self.model.metadata, self.architecture))
        return [self._kind(layer, kind_of) for layer in layers]

    def _kind(self, layer: int, kind_of: Mapping[str, str]) -> str:
        for module, kind in kind_of.items():
            if self.has(f"blk.{layer}.{module}.weight"):
                return kind
        raise ModelError(f"{self.model.path} lacks what layer {layer} is made of: {', '.join(kind_of)}")

    def has_in_any_layer(self, tensor: str) -> bool:
        return any(name.endswith(f".{tensor}") for name in self.model.tensors)
