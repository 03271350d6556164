"""A GGUF file's metadata by the names that they have within its architecture. Free of torch."""

from collections.abc import Mapping

from ...errors import ModelError
from ..scalars import Section
from .file import GgufModel, TensorInfo
from .names import num_layers

# A field of ours: gates, ups and each expert are matrices by themselves, of a family whose checkpoints join them.
HAS_PARTS_APART = "has_parts_apart"


class Fields(Section):
    """A model's metadata, its architecture's fields by their names without it.

    Its methods raise `ModelError` naming the field that is of another kind, `KeyError` for one that is not there.
    """

    def __init__(self, model: GgufModel, architecture: str) -> None:
        within = f"{architecture}."
        own = ((name, value) for name, value in model.metadata.items() if name.startswith(within))
        super().__init__({name.removeprefix(within): value for name, value in own}, within)
        self.model = model
        self.architecture = architecture

    def positive_or_none(self, name: str) -> int | None:
        return None if self.get(name) is None else self.positive(name)

    def alike(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A number that may be given for each layer, as 0 of those that have none of it.

        Raises `ModelError` where the others differ.
        """
        numbers = self.wholes(name) if isinstance(self.get(name), list) else (self.whole(name, default),)
        found = set(numbers) - {0} or {0}
        if len(found) != 1:
            raise ModelError(f"{self.within}{name} differs between layers: {list(numbers)}")
        if (size := found.pop()) < least:
            raise ModelError(f"{self.within}{name} must be at least {least}, not {size}")
        return size

    def has(self, tensor: str) -> bool:
        return tensor in self.model.tensors

    def tensor(self, name: str, num_dimensions: int = 2) -> TensorInfo:
        """Raises `ModelError` where it has not so many dimensions."""
        if (info := self.model.tensors.get(name)) is None:
            raise ModelError(f"there is no tensor {name}")
        if len(info.shape) != num_dimensions:
            raise ModelError(f"tensor {name} has {len(info.shape)} dimensions, and must have {num_dimensions}")
        return info

    def kinds(self, kind_of: Mapping[str, str]) -> list[str]:
        """Each layer's kind: that of the first of these matrices that it has. Raises `ModelError` where it has none."""
        layers = range(num_layers(self.model.metadata, self.architecture))
        return [self._kind(layer, kind_of) for layer in layers]

    def _kind(self, layer: int, kind_of: Mapping[str, str]) -> str:
        for module, kind in kind_of.items():
            if self.has(f"blk.{layer}.{module}.weight"):
                return kind
        raise ModelError(f"layer {layer} has none of the tensors that it may be made of: {', '.join(kind_of)}")

    def has_in_any_layer(self, tensor: str) -> bool:
        return any(name.endswith(f".{tensor}") for name in self.model.tensors)
