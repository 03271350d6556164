"""What kind each layer is, as a `config.json` says it. Free of torch."""

from collections.abc import Callable

from ...errors import ModelError
from ..model_folder import Raw
from ..scalars import whole


def read_layer_types(raw: Raw, supported: tuple[str, ...], default: Callable[[int], str]) -> list[str]:
    """One entry a layer: as `layer_types` says, or by the family's rule where it is left out."""
    num_layers = whole(raw, "num_hidden_layers")
    kinds = [str(kind) for kind in raw.get("layer_types") or map(default, range(num_layers))]
    if len(kinds) != num_layers:
        raise ModelError(f"layer_types has {len(kinds)} entries for {num_layers} layers")
    if others := sorted(set(kinds) - set(supported)):
        raise ModelError(f"layer_types has {', '.join(others)}; supported: {', '.join(supported)}")
    return kinds
