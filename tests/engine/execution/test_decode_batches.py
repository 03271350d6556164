"""Batches of sequences that decode: what is kept from one to the next is never other sequences'."""

from array import array

import torch

from headrace.engine.execution.batch import DecodeBatches
from headrace.engine.scheduling.decode_rows import DecodeRows
from headrace.engine.scheduling.scheduled_sequence import as_decode
from headrace.engine.scheduling.sequence import Sequence, new_block_table
from headrace.kernels.paged_attention import AttentionMetadata
from headrace.kernels.paged_attention.native_layout import NativeLayout

CPU = torch.device("cpu")
BLOCK_SIZE = 4
TOKENS = torch.zeros(2, dtype=torch.int64)


def decode_rows(first_block: int) -> DecodeRows:
    """Two sequences of blocks of their own, whose second tokens are still to be computed."""
    tables = [new_block_table([first_block + row]) for row in range(2)]
    sequences = [Sequence("", array("i", [1, 2]), 1, BLOCK_SIZE, block_table=each) for each in tables]
    for sequence in sequences:
        sequence.num_computed_tokens = 1
    rows = DecodeRows.of([as_decode(sequence) for sequence in sequences])
    assert rows is not None
    return rows


def check_layout(attention: AttentionMetadata) -> None:
    anew = NativeLayout.build(attention)
    layout, width = attention.native_layout, anew.block_tables.shape[1]
    assert layout.block_tables[:, :width].tolist() == anew.block_tables.tolist()
    assert layout.context_lens.tolist() == anew.context_lens.tolist()


def test_a_batch_goes_on_from_the_one_before_it_while_the_sequences_are_the_same():
    batches = DecodeBatches(CPU)
    first, second = decode_rows(first_block=1), decode_rows(first_block=5)
    begun = batches.batch(first, TOKENS).attention
    first.advance()
    following = batches.batch(first, TOKENS).attention
    # The step that would follow, were the sequences the same.
    second.advance()
    second.advance()
    of_others = batches.batch(second, TOKENS).attention
    for attention in (begun, following, of_others):
        check_layout(attention)
    assert following.decode_step is not None
    assert of_others.decode_step is not None
    assert following.decode_step.follows(begun.decode_step)
    assert not of_others.decode_step.follows(following.decode_step)
