"""What decoder layers are built of: blank matrices, with the names their weights have on disk, and what a step says."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.linear import Linear
from ...kernels.paged_attention import AttentionMetadata
from ...kernels.recurrent_states import StateSlots
from ...kernels.weight_memory import empty_weight
from ..checkpoints.cut import OF_MATRIX, OF_OUTPUTS
from ..checkpoints.model_config import ModelConfig
from ..checkpoints.weights import WeightSlot
from ..quantization.stored import StoredModules, stored_modules
from ..sharding.ranks import ALONE, Ranks


class LinearPart(NamedTuple):
    """A projection by itself, as checkpoints name it: `size` outputs of the matrix that it is a part of.

    order: [size] int64 on the host, where checkpoints have each of its outputs; None: as it has them.
    """

    linear: Linear
    start: int
    size: int
    order: Tensor | None = None


@dataclass(frozen=True)
class BlankWeights:
    """Makes weights that are still to be filled. `prefix`: of their names in the checkpoint, with a dot at its end.

    `parts`: all the projections made, by these names. `ranks`: with whom the model is shared; `config` is then that of
    the share.
    """

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    prefix: str = ""
    parts: dict[str, LinearPart] = field(default_factory=dict)
    ranks: Ranks = ALONE

    def within(self, name: str) -> "BlankWeights":
        """The weights of a part of what this makes the weights of."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def matrix(self, rows: int, columns: int) -> Tensor:
        return empty_weight((rows, columns), self.dtype, self.device)

    def linear(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        in_size: int,
        bias: bool = False,
        quantizable: bool = True,
        orders: Sequence[Tensor | None] = (),
        is_plain: bool = False,
    ) -> Linear:
        """Modules side by side, each of so many outputs, multiplied as one: quantised where the checkpoint's are.

        `quantizable`, `is_plain`: see `Linear`; the checkpoint's may be quantised all the same.

        orders: of each module's outputs, as `LinearPart` has them. What is not quantised is to be read so: see
        `linear_slots`.
        """
        orders = orders or [None] * len(names)
        offsets = torch.empty(sum(sizes), dtype=self.dtype, device=self.device) if bias else None
        full_names = [self.prefix + name for name in names]
        quantization = self.config.quantization
        scheme = quantization.scheme(full_names) if quantization and quantizable else None
        if scheme is None:
            linear = Linear(self.matrix(sum(sizes), in_size), offsets, quantizable, is_plain)
        else:
            stored = stored_modules(scheme, full_names, sizes, in_size, self.dtype, self.device, orders)
            linear = Linear(stored, offsets, is_plain=is_plain)
        starts = accumulate(sizes, initial=0)
        for start, name, size, order in zip(starts, full_names, sizes, orders, strict=False):
            self.parts[name] = LinearPart(linear, start, size, order)
        return linear

    def norm(self, size: int) -> Tensor:
        """In float32 where something is added to the weights: half precision would lose most of a small one."""
        dtype = torch.float32 if self.config.norm_offset else self.dtype
        return torch.empty(size, dtype=dtype, device=self.device)


@dataclass(frozen=True)
class Step:
    """What all layers need to know of a batch.

    rotary: for each of the model's ropes, the cosines and the sines of the tokens' positions, each [num_tokens,
    rotary_dim / 2]. slots: [num_tokens] int64, where their keys and values belong. wanted: [n] int64, the tokens whose
    attention is to be computed, those of `metadata`; None: all. query_factors: [num_tokens, 1, 1], what queries are
    multiplied by; None: by nothing. states: where the sequences have theirs, of a model whose layers have some.
    states_beside: each layer's, of a model whose layers have some beside keys and values. layer_inputs: [num_tokens,
    num_layers, size], each layer's own, of a model whose layers have some.
    """

    rotary: Sequence[Sequence[Tensor]]
    slots: Tensor
    metadata: AttentionMetadata
    wanted: Tensor | None = None
    query_factors: Tensor | None = None
    states: StateSlots | None = None
    states_beside: Sequence[tuple[Tensor, Tensor]] = ()
    layer_inputs: Tensor | None = None

    def of_wanted(self) -> "Step":
        """What layers need to know that are given the wanted tokens alone, and write no keys."""
        wanted = self.wanted
        assert wanted is not None
        return replace(
            self,
            rotary=[[factors[wanted] for factors in pair] for pair in self.rotary],
            wanted=None,
            query_factors=None if self.query_factors is None else self.query_factors[wanted],
            layer_inputs=None if self.layer_inputs is None else self.layer_inputs[wanted],
        )


def linear_slots(
    linear: Linear,
    names: Sequence[str],
    sizes: Sequence[int] | None = None,
    orders: Sequence[Tensor | None] = (),
) -> Iterator[WeightSlot]:
    """The parts of a projection under the names the checkpoint gives them: equal parts, or of the sizes given.

    orders: as `BlankWeights.linear` was given them.
    """
    sizes, orders = list(sizes or [linear.num_outputs // len(names)] * len(names)), orders or [None] * len(names)
    if isinstance(linear.held, StoredModules):
        yield from linear.held.slots()
    else:
        for name, weight, order in zip(names, linear.weight.split_with_sizes(sizes), orders, strict=True):
            yield WeightSlot(f"{name}.weight", weight, axes=OF_MATRIX, order=order)
    if linear.bias is not None:
        for name, bias, order in zip(names, linear.bias.split_with_sizes(sizes), orders, strict=True):
            yield WeightSlot(f"{name}.bias", bias, axes=OF_OUTPUTS, order=order)
