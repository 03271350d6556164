"""Penalties on tokens that were there before, for the few (row, token) pairs they touch."""

import torch
from torch import Tensor

from ..device import runs_triton


def penalize_(
    logits: Tensor,
    rows: Tensor,
    tokens: Tensor,
    counts: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """Change `logits` ([n, vocab] float) in place where a row has seen a token, and nowhere else.

    rows, tokens: [m] int64, each pair once: the tokens of that row's prompt and output. counts: [m], how often the
    token is in the output. repetition, presence, frequency: [m] float, those of the pair's row. The repetition
    penalty divides a positive logit and multiplies a negative one (Keskar et al., CTRL, 2019); frequency × count
    and, for tokens of the output, presence are then subtracted. `reference.penalized` is the same, densely.
    """
    if runs_triton(logits) and logits.dtype == torch.float32:
        from .triton import penalize_triton

        return penalize_triton(logits, rows, tokens, counts, repetition, presence, frequency)
    seen = logits[rows, tokens]
    seen = torch.where(seen > 0, seen / repetition, seen * repetition)
    logits[rows, tokens] = seen - frequency * counts - presence * (counts > 0)
    return None
