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
