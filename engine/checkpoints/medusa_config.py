"""What Medusa heads are: the `config.json` beside their weights. Free of torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ..errors import ModelError
from .model_folder import read_config


@dataclass(frozen=True)
class MedusaConfig:
    """`num_heads` heads of `num_layers` residual blocks each. The names on disk are `medusa_num_heads` and so on."""

    path: Path
    num_heads: int
    num_layers: int

    @classmethod
    def from_pretrained(cls, path: str | Path) -> Self:
        """Raises `ModelError` where the folder holds no Medusa heads."""
        folder = Path(path)
        raw = read_config(folder)
        numbers = [raw.get("medusa_num_heads"), raw.get("medusa_num_layers", 1)]
        for name, number, least in zip(("medusa_num_heads", "medusa_num_layers"), numbers, (1, 0), strict=True):
            if not isinstance(number, int) or number < least:
                raise ModelError(
                    f"{folder / 'config.json'} is not of Medusa heads: {name} must be a whole number, at least "
                    f"{least}, not {number!r}"
                )
        return cls(folder, *numbers)

    def shapes(self, hidden_size: int, vocab_size: int) -> dict[str, tuple[int, ...]]:
        """Each tensor's shape under its name, for a model of these sizes."""
        shapes: dict[str, tuple[int, ...]] = {}
        for head in range(self.num_heads):
            for block in range(self.num_layers):
                shapes[f"{head}.{block}.linear.weight"] = (hidden_size, hidden_size)
                shapes[f"{head}.{block}.linear.bias"] = (hidden_size,)
            shapes[f"{head}.{self.num_layers}.weight"] = (vocab_size, hidden_size)
        return shapes
