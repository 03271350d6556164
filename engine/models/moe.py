"""The MLP of mixtures: a router sends each token to a few experts; some add one for all."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ...kernels.device import runs_triton
from ...kernels.linear import Linear
from ...kernels.linear.gates import GATES, Gate
from ...kernels.moe import (
    ClampedGate,
    StackedExperts,
    choose_experts,
    mix_experts,
    mix_stacked_experts,
    stack_experts,
)
from ..checkpoints.model_config import MlpNames, MoeConfig
from ..checkpoints.weight_files import holds_tensor
from ..checkpoints.weights import WeightSlot
from .blocks import BlankWeights, linear_slots
from .mlp import ACTIVATIONS, GatedMlp
from .stacked import ExpertMatrices, StackedExpert


@dataclass(frozen=True)
class _Naming:
    """What a checkpoint calls a mixture, below its layer, and the parts of an expert."""

    mixture: str
    expert: MlpNames
    shared: str = "shared_expert"
    router: str = "gate"
    correction: str = "gate.e_score_correction_bias"


_NAMINGS = {
    "mixtral": _Naming("block_sparse_moe", MlpNames(("w1", "w3"), "w2")),
    "qwen": _Naming("mlp", MlpNames()),
    "qwen-stacked": _Naming("mlp", MlpNames()),
    "glm": _Naming("mlp", MlpNames(), "shared_experts"),
    "hunyuan": _Naming("mlp", MlpNames(), "shared_mlp", "gate.wg"),
    "ernie": _Naming("mlp", MlpNames(), "shared_experts", correction="moe_statics.e_score_correction_bias"),
    "minimax": _Naming("block_sparse_moe", MlpNames(("w1", "w3"), "w2"), correction="e_score_correction_bias"),
}


class Expert(Protocol):
    """Two products, with a gate between them."""

    @property
    def gate_up(self) -> Linear: ...

    @property
    def down(self) -> Linear: ...

    def __call__(self, x: Tensor) -> Tensor:
        """x: [n, hidden_size]. Returns the same shape."""


ExpertType = TypeVar("ExpertType", bound=Expert)


class Mixture(ABC, Generic[ExpertType]):
    """Σ share · expert(x) over the experts chosen.

    `name` is what checkpoints call it where an ordinary layer has its `mlp`. `stacked`: the experts' matrices on a GPU,
    where who has which token is known there alone; None: each is called with its tokens.
    """

    name = "mlp"

    def __init__(self, router: Linear, experts: Sequence[ExpertType], gate: Gate | ClampedGate) -> None:
        self.router = router
        self.experts = experts
        self._gate = gate
        self.stacked: StackedExperts | None = None

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden_size]. Returns the same shape."""

    @abstractmethod
    def projections(self) -> Iterator[Linear]: ...

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


class ExpertsMlp(Mixture[Expert]):
    """With gate · shared expert(x) added where there is one."""

    def __init__(self, blank: BlankWeights, moe: MoeConfig) -> None:
        self._moe = moe
        self._ranks = blank.ranks
        naming = _NAMINGS[moe.naming]
        self.name = naming.mixture
        blank = blank.within(self.name)
        self._matrices = _StackedMatrices.of(blank, moe) if _are_stacked(blank, moe, naming) else None
        self._listed = [] if self._matrices else list(_listed_experts(blank, moe, naming))
        hidden_size = blank.config.hidden_size
        # Small, and a rounding here would change who computes: never in int8, and sigmoids, which lie closer to each
        # other than logits, in float32, as their families have it.
        self._router_dtype = torch.float32 if moe.has_wide_router else blank.dtype
        router = replace(blank, dtype=self._router_dtype)
        super().__init__(
            router.linear([naming.router], [moe.num_experts], hidden_size, quantizable=False),
            self._matrices.experts(blank) if self._matrices else self._listed,
            GATES[ACTIVATIONS[blank.config.activation]],
        )
        self._correction = (
            torch.empty(moe.num_experts, dtype=torch.float32, device=blank.device) if moe.has_correction else None
        )
        self._router_name, self._correction_name = naming.router, naming.correction
        self._shared_name, shared_size = naming.shared, moe.shared_expert_intermediate_size
        self.shared = SharedExpert(blank, naming, shared_size, moe.has_shared_gate) if shared_size else None

    def __call__(self, x: Tensor) -> Tensor:
        ids, shares = choose_experts(
            self.router(x.to(self._router_dtype)),
            self._moe.num_experts_per_tok,
            self._moe.norm_topk_prob,
            self._correction,
            self._moe.routed_scaling_factor,
            self._moe.are_sigmoids,
        )
        mixed = self.mix(x, ids, shares)
        return self._ranks.sum(mixed if self.shared is None else mixed + self.shared(x))

    def projections(self) -> Iterator[Linear]:
        yield self.router
        for expert in self.experts:
            yield expert.gate_up
            yield expert.down
        if self.shared is not None:
            yield from self.shared.projections()

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from linear_slots(self.router, [f"{prefix}.{self._router_name}"])
        if self._correction is not None:
            yield WeightSlot(f"{prefix}.{self._correction_name}", self._correction)
        if self._matrices is not None:
            yield from self._matrices.weight_slots(f"{prefix}.experts")
        for index, expert in enumerate(self._listed):
            yield from expert.weight_slots(f"{prefix}.experts.{index}")
        if self.shared is not None:
            yield from self.shared.weight_slots(f"{prefix}.{self._shared_name}")


def _are_stacked(blank: BlankWeights, moe: MoeConfig, naming: _Naming) -> bool:
    """Whoever quantises experts writes each for itself, and so does transformers where it saves some families."""
    first = f"{blank.prefix}experts.0.{naming.expert.down}"
    quantization = blank.config.quantization
    if moe.naming != "qwen-stacked" or (quantization is not None and quantization.scheme([first]) is not None):
        return False
    return not holds_tensor(blank.config.path, f"{first}.weight")


def _listed_experts(blank: BlankWeights, moe: MoeConfig, naming: _Naming) -> Iterator[GatedMlp]:
    for index in range(moe.num_experts):
        yield GatedMlp(blank.within(f"experts.{index}"), moe.intermediate_size, naming.expert, is_expert=True)


class _StackedMatrices(NamedTuple):
    """Those of experts without biases that a checkpoint has stacked, gates before ups."""

    gate_up: ExpertMatrices
    down: ExpertMatrices

    @classmethod
    def of(cls, blank: BlankWeights, moe: MoeConfig) -> "_StackedMatrices":
        number, hidden, inner = moe.num_experts, blank.config.hidden_size, moe.intermediate_size
        return cls(
            ExpertMatrices(blank, "experts.gate_up_proj", number, 2 * inner, hidden, has_biases=False),
            ExpertMatrices(blank, "experts.down_proj", number, hidden, inner, has_biases=False),
        )

    def experts(self, blank: BlankWeights) -> list[StackedExpert]:
        activate = ACTIVATIONS[blank.config.activation]
        pairs = zip(self.gate_up.linears, self.down.linears, strict=True)
        return [StackedExpert(gate_up, down, activate) for gate_up, down in pairs]

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from self.gate_up.weight_slots(f"{prefix}.gate_up_proj")
        yield from self.down.weight_slots(f"{prefix}.down_proj")


class SharedExpert:
    """An expert that every token has, weighed by a gate of its own where it has one."""

    def __init__(self, blank: BlankWeights, naming: _Naming, inner_size: int, has_gate: bool) -> None:
        self.mlp = GatedMlp(blank.within(naming.shared), inner_size, naming.expert, is_expert=True)
        hidden_size = blank.config.hidden_size
        self.gate = blank.linear([f"{naming.shared}_gate"], [1], hidden_size, quantizable=False) if has_gate else None

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
