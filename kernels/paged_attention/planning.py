"""A step's plan for the layers of one shape and window: what is shared, and how the work is cut."""

from .attention_shape import AttentionShape
from .metadata import AttentionMetadata
from .plan import AttentionPlan
from .prefix_groups import Gate
from .prefix_levels import shared_spans
from .sharing_gate import is_worth_sharing


def plan_attention(
    metadata: AttentionMetadata,
    shape: AttentionShape,
    sliding_window: int | None = None,
    gate: Gate = is_worth_sharing,
) -> AttentionPlan:
    """A step's work list for layers with this window; `gate` is asked with numbers of sequences and of tokens.

    Under a window nothing is shared: queries at different positions see different parts of a prefix.
    """
    tiling, size = shape.tiling(metadata.device), metadata.block_size
    if sliding_window is not None:
        return AttentionPlan.build(metadata, tiling, (), sliding_window)
    # Whoever fills a Q-block alone gains nothing from sharing one.
    usable = [
        (context - queries) // size if queries <= tiling.wide_queries else 0
        for queries, context in zip(metadata.query_lens, metadata.context_lens, strict=True)
    ]
    spans = shared_spans(metadata.block_tables, usable, lambda members, blocks: gate(members, blocks * size))
    return AttentionPlan.build(metadata, tiling, spans)
