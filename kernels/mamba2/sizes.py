"""What a scan's sizes have to be, whatever computes it."""

from torch import Tensor


def num_groups_of(mixed: Tensor, states: Tensor, dt_limits: tuple[float, float]) -> int:
    """How many groups there are. Raises `ValueError` where sizes, or `dt_limits`, are none of a scan.

    mixed: [num_tokens, size]; states: [num_slots, num_heads, state_dim, head_dim].
    """
    _, num_heads, state_dim, head_dim = states.shape
    num_groups, rest = divmod(mixed.shape[1] - num_heads * head_dim, 2 * state_dim)
    if rest or num_groups < 1 or num_heads % num_groups:
        raise ValueError(
            f"mixed {tuple(mixed.shape)} must have {head_dim} inputs for each of {num_heads} heads, and a B and a C of "
            f"{state_dim} for each group, of which the heads are a multiple"
        )
    if not 0 <= dt_limits[0] <= dt_limits[1]:
        raise ValueError(f"dt_limits {dt_limits} must be a least and a greatest step, neither below zero")
    return num_groups
