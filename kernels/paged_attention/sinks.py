"""Attention sinks: a score beside those of the keys, which takes a share of the softmax that no value gets.

They are gpt-oss' (and, by their name, those of arXiv 2309.17453, where a first token does the same).
"""

import torch
from torch import Tensor


def softmax_with_sinks(scores: Tensor, sinks: Tensor) -> Tensor:
    """The keys' shares, which sum to less than one. scores: [..., num_keys]; sinks: as wide with a last size of one."""
    weights = scores.softmax(-1)
    # The highest score's weight is one over the sum of all, each relative to that one.
    highest, largest = scores.amax(-1, keepdim=True), weights.amax(-1, keepdim=True)
    return weights.mul_(1 / (1 + largest * torch.exp(sinks - highest)))
