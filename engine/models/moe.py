"""The MLP of mixtures: a router sends each token to a few experts; some add one for all."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol, Self

import torch
from torch import Tensor

from ...kernels.device import runs_triton
from ...kernels.linear import GATES, Linear, RowFormat
from ...kernels.moe import (
    ExpertGate,
    ExpertGroups,
    SquaredRelu,
    StackedExperts,
    choose_experts,
    mix_experts,
    mix_stacked_experts,
    stack_experts,
)
from ..checkpoints.model_config import ModelConfig, MoeConfig
from ..checkpoints.model_shape import MoeNames
from ..checkpoints.weight_files import holds_tensor
from ..checkpoints.weights import WeightSlot
from .blocks import BlankWeights, linear_slots
from .mlp import ACTIVATIONS, GatedMlp, PlainMlp, new_mlp
from .stacked import StackedMatrices


class Expert(Protocol):
    """Two products, with a gate between them."""

    @property
    def gate_up(self) -> Linear: ...

    @property
    def down(self) -> Linear: ...

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, hidden_size]. Returns the same shape."""


class Mixture(ABC):
    """Σ share · expert(x) over the experts chosen.

    `name` is what checkpoints call it where an ordinary layer has its `mlp`. `stacked`: the experts' matrices on a GPU,
    where who has which token is known there alone; None: each is called with its tokens.
    """

    name = "mlp"
    # The router takes the input in the model's dtype.
    row_format: RowFormat | None = None

    def __init__(self, router: Linear, experts: Sequence[Expert], gate: ExpertGate) -> None:
        self.router = router
        self.experts = experts
        self._gate = gate
        self.stacked: StackedExperts | None = None

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden_size]. Returns the same shape."""

    def projections(self) -> Iterator[Linear]:
        """The router and the experts' matrices."""
        yield self.router
        yield from (each.gate_up for each in self.experts)
        yield from (each.down for each in self.experts)

    @abstractmethod
    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]: ...

    def mix(self, x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        """See `mix_experts`."""
        if self.stacked is None:
            return mix_experts(x, self.experts, ids, shares)
        return mix_stacked_experts(x, self.stacked, ids, shares)

    def stack(self) -> None:
        """Put the experts' matrices side by side, once they are packed, where a GPU's kernels take them so."""
        router = self.router.packed
        if isinstance(router, Tensor) and runs_triton(router):
            gate_up, down = zip(*((expert.gate_up, expert.down) for expert in self.experts), strict=True)
            self.stacked = stack_experts(gate_up, down, self._gate)


class ExpertsMlp(Mixture):
    """With gate · shared expert(x) added where there is one."""

    def __init__(self, blank: BlankWeights, moe: MoeConfig) -> None:
        self._moe = moe
        self._ranks = blank.ranks
        self.name = moe.names.mixture
        blank = blank.within(self.name) if self.name else blank
        self._matrices = StackedMatrices.of(blank, moe) if _are_stacked(blank, moe) else None
        self._listed = [] if self._matrices else list(_listed_experts(_of_experts(blank, moe), moe))
        hidden_size = blank.config.hidden_size
        # Small, and a rounding here would change who computes: never in int8, and sigmoids, which lie closer to each
        # other than logits, in float32, as their families have it.
        self._router_dtype = torch.float32 if moe.has_wide_router else blank.dtype
        router = replace(blank, dtype=self._router_dtype)
        super().__init__(
            router.linear([moe.names.router], [moe.num_experts], hidden_size, quantizable=False),
            self._matrices.experts(ACTIVATIONS[blank.config.activation]) if self._matrices else self._listed,
            _gate(blank.config),
        )
        self._correction = (
            torch.zeros(moe.num_experts, dtype=torch.float32, device=blank.device) if moe.has_correction else None
        )
        self._latents = None if moe.latent_size is None else Latents.of(blank, moe.names, moe.latent_size)
        shared_size = moe.shared_expert_intermediate_size
        self.shared = SharedExpert(blank, moe.names, shared_size, moe.has_shared_gate) if shared_size else None

    def __call__(self, x: Tensor) -> Tensor:
        ids, shares = choose_experts(
            self.router(x.to(self._router_dtype)),
            self._moe.num_experts_per_tok,
            self._moe.norm_topk_prob,
            self._correction,
            self._moe.routed_scaling_factor,
            self._moe.are_sigmoids,
            ExpertGroups(self._moe.num_groups, self._moe.num_chosen_groups),
        )
        mixed = self.mix(x if self._latents is None else self._latents.of_tokens(x), ids, shares)
        if self._latents is not None:
            mixed = self._latents.tokens(mixed)
        if self.shared is not None:
            mixed = torch.add(mixed, self.shared(x), alpha=self._moe.shared_scaling_factor)
        return self._ranks.sum(mixed)

    def projections(self) -> Iterator[Linear]:
        yield from super().projections()
        if self._latents is not None:
            yield from self._latents
        if self.shared is not None:
            yield from self.shared.projections()

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        names = self._moe.names
        yield from linear_slots(self.router, [f"{prefix}.{names.router}"])
        if self._correction is not None and self._moe.stores_correction:
            yield WeightSlot(f"{prefix}.{names.correction}", self._correction)
        if self._matrices is not None:
            yield from self._matrices.weight_slots(prefix)
        for index, expert in enumerate(self._listed):
            yield from expert.weight_slots(f"{prefix}.experts.{index}")
        if self._latents is not None:
            for name, linear in zip(names.latents, self._latents, strict=True):
                yield from linear_slots(linear, [f"{prefix}.{name}"])
        if self.shared is not None:
            yield from self.shared.weight_slots(f"{prefix}.{names.shared}")


def new_feed_forward(blank: BlankWeights, index: int) -> GatedMlp | PlainMlp | ExpertsMlp:
    """What the layer of this index has behind its attention: experts, or an ordinary MLP. blank: of the layer."""
    moe = blank.config.moe
    return ExpertsMlp(blank, moe) if moe is not None and moe.sparse_layers[index] else new_mlp(blank)


def _gate(config: ModelConfig) -> ExpertGate:
    """What experts have between their products."""
    if config.is_gated:
        return GATES[ACTIVATIONS[config.activation]]
    assert config.activation == "relu2", "of experts without gates no other is known"
    return SquaredRelu()


def _are_stacked(blank: BlankWeights, moe: MoeConfig) -> bool:
    if moe.names.layout != "either":
        return moe.names.layout == "stacked"
    first = f"{blank.prefix}experts.0.{moe.names.expert.down}"
    quantization = blank.config.quantization
    if quantization is not None and quantization.scheme([first]) is not None:
        return _is_stored(blank, f"{blank.prefix}{moe.names.stacked[1]}")
    return not _is_stored(blank, f"{first}.weight")


def _is_stored(blank: BlankWeights, tensor: str) -> bool:
    return holds_tensor(blank.config.path, blank.config.other_names.anywhere(tensor))


def _listed_experts(blank: BlankWeights, moe: MoeConfig) -> Iterator[GatedMlp | PlainMlp]:
    for index in range(moe.num_experts):
        yield _new_expert(blank.within(f"experts.{index}"), moe.intermediate_size, moe.names)


def _of_experts(blank: BlankWeights, moe: MoeConfig) -> BlankWeights:
    """To them what they are given is a token."""
    if moe.latent_size is None:
        return blank
    return replace(blank, config=replace(blank.config, hidden_size=moe.latent_size))


def _new_expert(blank: BlankWeights, inner_size: int, names: MoeNames) -> GatedMlp | PlainMlp:
    """blank: of the expert."""
    kind = GatedMlp if blank.config.is_gated else PlainMlp
    return kind(blank, inner_size, names.expert, is_expert=True)


class Latents(NamedTuple):
    """What makes of a token what its experts are given, and of what they give the token's."""

    of_tokens: Linear
    tokens: Linear

    @classmethod
    def of(cls, blank: BlankWeights, names: MoeNames, size: int) -> Self:
        """blank: of the mixture."""
        hidden, (into, out) = blank.config.hidden_size, names.latents
        return cls(blank.linear([into], [size], hidden), blank.linear([out], [hidden], size))


class SharedExpert:
    """An expert that every token has, weighed by a gate of its own where it has one."""

    def __init__(self, blank: BlankWeights, names: MoeNames, inner_size: int, has_gate: bool) -> None:
        self.mlp = _new_expert(blank.within(names.shared), inner_size, names)
        hidden_size = blank.config.hidden_size
        self.gate = blank.linear([f"{names.shared}_gate"], [1], hidden_size, quantizable=False) if has_gate else None

    def __call__(self, x: Tensor) -> Tensor:
        output = self.mlp(x)
        return output if self.gate is None else torch.sigmoid(self.gate(x)) * output

    def projections(self) -> Iterator[Linear]:
        yield from self.mlp.projections()
        if self.gate is not None:
            yield self.gate

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.mlp.weight_slots(prefix)
        if self.gate is not None:
            yield from linear_slots(self.gate, [f"{prefix}_gate"])
