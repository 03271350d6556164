"""A step's plan for the layers of one shape and window on the GPU: what is shared, and how the work is cut.

Which shared prefixes are computed once for all who have them goes by what an H200 took for decodes with Llama-3-8B's
heads (`benchmarks/gpu.py --only sharing`): 32 sequences that share 256 tokens ran at 0.99 of plain attention's speed,
those that share 512 at 1.51 times it. With few sequences a prefix's keys stay in the second-level cache from one to
the next, and three launches take longer than one, so it has to be longer before reading it once saves anything.
"""

from .attention_shape import AttentionShape
from .metadata import AttentionMetadata
from .plan import AttentionPlan
from .prefix_groups import Gate
from .prefix_levels import shared_spans

# From so many sequences on (the first that applies), a shared prefix of so many tokens is worth an item of its own.
MIN_SHARED_TOKENS = ((256, 128), (64, 256), (32, 512), (16, 1024), (8, 2048), (2, 8192))


def is_worth_sharing(num_sequences: int, num_tokens: int) -> bool:
    """Whether a prefix of `num_tokens` that `num_sequences` sequences share is to be read once for all of them."""
    for sequences, tokens in MIN_SHARED_TOKENS:
        if num_sequences >= sequences:
            return num_tokens >= tokens
    return False


def plan_attention(
    metadata: AttentionMetadata,
    shape: AttentionShape,
    sliding_window: int | None = None,
    gate: Gate = is_worth_sharing,
    room: int = 0,
) -> AttentionPlan:
    """A step's work list for layers with this window; `gate` is asked with numbers of sequences and of tokens.

    Under a window nothing is shared: queries at different positions see different parts of a prefix. `room`: see
    `AttentionPlan.build`.
    """
    tiling, size = shape.tiling(metadata.device), metadata.block_size
    if sliding_window is not None:
        return AttentionPlan.build(metadata, tiling, (), sliding_window, room)
    # Whoever fills a Q-block alone gains nothing from sharing one.
    may_share = metadata.queries <= tiling.wide_queries
    usable = (metadata.contexts - metadata.queries) // size * may_share
    spans = shared_spans(metadata.tables, usable.tolist(), lambda members, blocks: gate(members, blocks * size))
    return AttentionPlan.build(metadata, tiling, spans, room=room)
