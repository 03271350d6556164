"""What a rule's sizes have to be, whatever computes it."""

from torch import Tensor


def num_key_heads_of(mixed: Tensor, states: Tensor) -> int:
    """How many key heads there are. Raises `ValueError` where sizes are none of a rule.

    mixed: [num_tokens, size]; states: [num_slots, num_heads, key_dim, value_dim].
    """
    _, num_heads, key_dim, value_dim = states.shape
    num_key_heads, rest = divmod(mixed.shape[1] - num_heads * value_dim, 2 * key_dim)
    if rest or num_key_heads < 1 or num_heads % num_key_heads:
        raise ValueError(
            f"mixed {tuple(mixed.shape)} must have queries and keys of {key_dim} for each key head, and values of "
            f"{value_dim} for each of {num_heads} heads, a multiple of the key heads"
        )
    return num_key_heads
