"""A sequence's part in a step. Free of torch."""

from typing import NamedTuple

from .sequence import Sequence

_new_tuple = tuple.__new__


class ScheduledSequence(NamedTuple):
    """`num_tokens` of `sequence`, from its first uncomputed one on, are computed in this step.

    `reaches_end`: the last of them is the sequence's last, so that its logits are wanted. `is_new`: before the step
    the sequence owned no blocks. `draft`: guesses of what follows that last one; they count among `num_tokens`, and
    their logits are wanted too. (A tuple: there is one for each sequence in each step.)
    """

    sequence: Sequence
    num_tokens: int
    reaches_end: bool
    is_new: bool = False
    draft: tuple[int, ...] = ()


def as_decode(sequence: Sequence) -> ScheduledSequence:
    """One token of it, its last one. (As the class itself does, without looking at names and defaults.)"""
    return _new_tuple(ScheduledSequence, (sequence, 1, True, False, ()))
