"""A matrix of a model by its size alone: what it takes in memory, however it is quantised. Free of torch."""

from dataclasses import dataclass

from .quantization_schemes import (
    MXFP4_GROUP,
    NVFP4_GROUP,
    BlockScheme,
    Int4Scheme,
    Mxfp4Scheme,
    Nvfp4Scheme,
    WeightScheme,
)

_HALF_BYTES, FLOAT_BYTES = 2, 4


@dataclass(frozen=True)
class Projection:
    """A matrix that is multiplied by, with its bias. `name`: as in the checkpoint; there are `copies` like it.

    `is_wide`: in float32, whatever the others are in.
    """

    name: str
    num_outputs: int
    num_inputs: int
    has_bias: bool = False
    copies: int = 1
    is_quantizable: bool = True
    is_wide: bool = False

    @property
    def num_weights(self) -> int:
        return self.copies * self.num_outputs * self.num_inputs

    @property
    def num_biases(self) -> int:
        return self.copies * self.num_outputs * self.has_bias

    def num_bias_bytes(self, item_bytes: int) -> int:
        return self.num_biases * (FLOAT_BYTES if self.is_wide else item_bytes)

    def num_bytes(self, scheme: WeightScheme | None, item_bytes: int) -> int:
        """Of the weights as they are kept; `scheme`: as the checkpoint has quantised them."""
        if scheme is None or not self.is_quantizable:
            return self.num_weights * (FLOAT_BYTES if self.is_wide else item_bytes)
        if isinstance(scheme, Int4Scheme):
            groups = -(-self.num_inputs // (scheme.group_size or self.num_inputs))
            # A scale and a zero for each group of each output: a byte, or a float.
            num_groups = self.copies * self.num_outputs * groups
            zero_bytes = _HALF_BYTES if scheme.has_minima else 1
            return self.num_weights // 2 + num_groups * (_HALF_BYTES + zero_bytes)
        if isinstance(scheme, Mxfp4Scheme):
            return self.num_weights // 2 + self.num_weights // MXFP4_GROUP * _HALF_BYTES
        if isinstance(scheme, Nvfp4Scheme):
            groups = -(-self.num_inputs // NVFP4_GROUP)
            return self.num_weights // 2 + self.copies * self.num_outputs * (groups + FLOAT_BYTES)
        if isinstance(scheme, BlockScheme):
            return self.num_weights + self.num_weights // scheme.group_size * FLOAT_BYTES
        rows, columns = scheme.block
        scales = {
            "tensor": 1,
            "channel": self.num_outputs,
            "block": -(-self.num_outputs // rows) * -(-self.num_inputs // columns),
        }[scheme.scales]
        return self.num_weights + self.copies * scales * FLOAT_BYTES
