"""What a draft model or Medusa heads take of a GPU's memory beside the model. Free of torch."""

from dataclasses import dataclass
from math import prod
from typing import Self

from ...engine.checkpoints.medusa_config import MedusaConfig
from ...engine.checkpoints.model_config import ModelConfig
from ...engine.checkpoints.model_size import kv_token_bytes, weight_bytes
from ...engine.config import EngineConfig
from ...engine.speculative.guessers import described_guesser


@dataclass(frozen=True)
class GuessNeeds:
    """In bytes; `num_layers`: those that have CUDA graphs of their own."""

    weight_bytes: int = 0
    kv_token_bytes: int = 0
    num_layers: int = 0

    @classmethod
    def of(cls, model: ModelConfig, options: EngineConfig, item_bytes: int) -> Self:
        """Reads descriptions alone. Raises `ConfigError` where the two do not go together.

        `item_bytes`: of the model's numbers, in which heads are kept.
        """
        guesser = None if options.speculative is None else described_guesser(options.speculative, model)
        if guesser is None:
            return cls()
        if isinstance(guesser, MedusaConfig):
            shapes = guesser.shapes(model.hidden_size, model.vocab_size).values()
            return cls(weight_bytes=item_bytes * sum(map(prod, shapes)))
        dtype = guesser.checkpoint_dtype if options.dtype == "auto" else options.dtype
        own_bytes = 4 if dtype == "float32" else 2
        kv_bytes = own_bytes if options.kv_cache_dtype == "auto" else 1
        return cls(weight_bytes(guesser, own_bytes), kv_token_bytes(guesser, kv_bytes), guesser.num_hidden_layers)


NO_GUESSER = GuessNeeds()
