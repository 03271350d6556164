"""What a vision tower takes, by its description alone: its weights, and what an image is to it. Free of torch."""

from .projection import FLOAT_BYTES
from .vision_config import PoolConfig, ScaledPoolConfig, VisionConfig


def num_vision_weights(vision: VisionConfig) -> int:
    size, inner = vision.hidden_size, vision.intermediate_size
    # The last one gives what the others take.
    *into, _ = vision.names.mlp
    biases = vision.has_biases
    mlp = len(into) * inner * (size + biases) + size * (inner + biases)
    attention = 4 * size * (size + biases)
    patches = size * (vision.patch_values + vision.has_patch_biases) + size * vision.has_patch_norm
    positions = size * ((vision.position_side or 0) ** 2 + 2 * (vision.num_axis_positions or 0))
    norms = (len(vision.names.norms) * vision.depth + vision.has_final_norm) * _num_norm_weights(vision, size)
    of_heads = 2 * size // vision.num_heads if vision.has_head_norms else 0
    limits = 4 * (4 + len(vision.names.mlp)) if vision.has_limits else 0
    blocks = vision.depth * (attention + mlp + of_heads + limits) + norms
    return patches + positions + blocks + _num_token_weights(vision)


def encode_bytes(vision: VisionConfig, num_tokens: int, item_bytes: int) -> int:
    """About the most that there is at a time while an image of so many tokens is encoded, weights left out."""
    size = vision.hidden_size
    # Beside five rows of a patch's own: what its MLP makes of them, or queries, keys and values, which are rotated in
    # float32, four at a time.
    mlp = (len(vision.names.mlp) + 1) * vision.intermediate_size * item_bytes
    attention = 2 * size * item_bytes + (0 if vision.rope_theta is None else 4 * size * FLOAT_BYTES)
    patches = num_tokens * vision.spatial_merge_size**2 * (5 * size * item_bytes + max(mlp, attention))
    return patches + num_tokens * vision.num_levels * vision.out_hidden_size * item_bytes


def _num_token_weights(vision: VisionConfig) -> int:
    """Of what makes tokens of patches."""
    size, out = vision.hidden_size, vision.out_hidden_size
    if isinstance(vision.projector, PoolConfig):
        return size + size * out
    if isinstance(vision.projector, ScaledPoolConfig):
        return 2 * size * vision.projector.is_standardized + size * out
    if (projector := vision.projector) is not None:
        return size + size * vision.merged_size + out * (size + out + 2 * projector.has_biases)
    return _num_merger_weights(vision, size) + len(vision.deepstack_layers) * _num_merger_weights(
        vision, vision.merged_size
    )


def _num_merger_weights(vision: VisionConfig, norm_size: int) -> int:
    merged = vision.merged_size
    return _num_norm_weights(vision, norm_size) + (merged + vision.out_hidden_size) * (merged + 1)


def _num_norm_weights(vision: VisionConfig, size: int) -> int:
    return size * (2 if vision.has_layer_norms else 1)
