"""Steps by the lengths of their sequences."""

import numpy
import torch

from headrace.engine.execution.batch import Batch
from headrace.kernels.paged_attention import AttentionMetadata

from .sharing import BLOCK_SIZE, CPU


def batch(query_lens: list[int], context_lens: list[int]) -> Batch:
    """Sequence after sequence, each with blocks of its own."""
    rows = range(len(query_lens))
    tables = [list(range(6 * row + 1, 6 * row + 7)) for row in rows]
    places = [
        (tables[row][position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE, position)
        for row in rows
        for position in range(context_lens[row] - query_lens[row], context_lens[row])
    ]
    attention = AttentionMetadata(query_lens, context_lens, tables, BLOCK_SIZE, CPU)
    num_tokens = len(places)
    token_ids = torch.arange(num_tokens) * 37 % 300
    return Batch(token_ids, numpy.array(places).T.copy(), attention, torch.tensor(query_lens).cumsum(0) - 1)
