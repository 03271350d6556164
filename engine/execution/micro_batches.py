"""A long step in micro-batches, which a pipeline's stages compute at the same time: one is a part ahead of the next.

They are cut by tokens, not by sequences (TeraPipe, arXiv:2102.07988), and never in an image whose tokens see all of it.
"""

from collections.abc import Iterator
from itertools import accumulate, pairwise

from ...kernels.paged_attention import AttentionMetadata
from ...kernels.recurrent_states import StateSlots
from .batch import Batch

# With fewer tokens a part would take about as long as the whole: its time is that of reading the weights. Measured on
# CPUs; on a GPU it is an estimate.
_MIN_TOKENS = {"cpu": 64, "cuda": 512}
# Of so many a stage waits for another one for about an eighth of the time.
_MOST_PARTS_PER_STAGE = 4


def num_micro_batches(batch: Batch, num_stages: int) -> int:
    """Into how many parts a step is to be split; 1: it is left whole, as one is whose sequences all decode on."""
    if num_stages == 1 or batch.attention.decode_step is not None:
        return 1
    least = _MIN_TOKENS[batch.attention.device.type]
    return max(1, min(len(batch.token_ids) // least, _MOST_PARTS_PER_STAGE * num_stages))


def micro_batches(batch: Batch, number: int) -> Iterator[Batch]:
    """Parts of about equal numbers of tokens, in their order; of which tokens logits are wanted they do not know.

    A sequence may be cut: its later tokens look back at what the parts before wrote into the KV cache. So do those of
    sequences that share blocks with one before them, which computes these.
    """
    for start, end in pairwise(_cuts(batch, number)):
        yield Batch(
            batch.token_ids[start:end],
            batch.places[:, start:end],
            _between(batch.attention, start, end),
            batch.last_token_index[:0],
            adapters=None if batch.adapters is None else batch.adapters[start:end],
            images=None if batch.images is None else batch.images.between(start, end),
            states=None if batch.states is None else _states_between(batch.states, start, end),
        )


def _cuts(batch: Batch, number: int) -> list[int]:
    """Where the parts begin, and where the last one ends; fewer where an image takes more than a part."""
    num_tokens = len(batch.token_ids)
    cuts = {num_tokens * part // number for part in range(number + 1)}
    for place, _, first, last in () if batch.images is None else batch.images.two_way_pieces:
        end = place + last - first
        cuts = {end if place < cut < end else cut for cut in cuts}
    return sorted(cuts)


def _between(attention: AttentionMetadata, start: int, end: int) -> AttentionMetadata:
    """The layout of the tokens from one of the batch's to before another."""
    query_lens, context_lens, tables = [], [], []
    ends = accumulate(attention.query_lens)
    for last, length, context, table in zip(
        ends, attention.query_lens, attention.context_lens, attention.block_tables, strict=True
    ):
        here = min(last, end) - max(last - length, start)
        if here > 0:
            query_lens.append(here)
            context_lens.append(context - max(0, last - end))
            tables.append(table)
    return AttentionMetadata(query_lens, context_lens, tables, attention.block_size, attention.device)


def _states_between(states: StateSlots, start: int, end: int) -> StateSlots:
    """Those of the same tokens: who began in a part before goes on from what that left."""
    here = [span for span in states.spans if span.start < end and span.start + span.length > start]
    lens = [min(span.start + span.length, end) - max(span.start, start) for span in here]
    read = [span.write if span.start < start else span.read for span in here]
    return StateSlots(lens, read, [span.write for span in here], states.device)
