"""Which layers of a mixture have experts, where a `config.json` lists them. Free of torch."""

from dataclasses import replace

from ...errors import ModelError
from ..model_folder import Raw
from ..model_shape import MoeConfig


def with_listed_layers(moe: MoeConfig, raw: Raw) -> MoeConfig:
    """As `mlp_layer_types` says, or as it was where that is left out."""
    if not (kinds := raw.get("mlp_layer_types")):
        return moe
    if len(kinds) != len(moe.sparse_layers):
        raise ModelError(f"mlp_layer_types has {len(kinds)} entries for {len(moe.sparse_layers)} layers")
    if others := set(map(str, kinds)) - {"dense", "sparse"}:
        raise ModelError(f"mlp_layer_types has {', '.join(sorted(others))}; supported: dense, sparse")
    return replace(moe, sparse_layers=tuple(kind == "sparse" for kind in kinds))
