"""From logits to tokens, repeatable by seed and counter."""

from .philox import philox_uniform
from .reference import sample_tokens

__all__ = ["philox_uniform", "sample_tokens"]
