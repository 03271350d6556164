"""Low-rank additions to some tokens' rows of a product, on the GPU; on a CPU they are `kernels.linear`'s."""

from .matrices import AdapterMatrices
from .token_tiles import TokenTiles

__all__ = ["AdapterMatrices", "TokenTiles"]
