"""From logits to tokens, repeatable by seed and counter."""

from .penalties import penalize_
from .philox import philox_uniform
from .reference import sample_tokens

__all__ = ["penalize_", "philox_uniform", "sample_tokens"]
