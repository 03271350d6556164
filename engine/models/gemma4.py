"""The layer of Gemma 4: Gemma 3's, with norms for values, and a number that all of it is multiplied by at its end.

Of a mixture each has experts beside its MLP; of the small models each has an input of its own behind it.
"""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from ...kernels.linear import Activations, Linear
from ...kernels.moe import choose_experts
from ...kernels.norm_rotary import apply_rotary, rms_norm
from ..checkpoints.model_config import MoeConfig
from ..checkpoints.weights import WeightSlot
from .attention import Attention
from .blocks import BlankWeights, Step
from .gemma import GemmaLayer
from .layer_inputs import LayerInputMlp
from .mlp import GatedMlp, PlainMlp, new_mlp
from .moe import ExpertsMlp, Mixture
from .norms import LayerNorm, RmsNorm


class Gemma4Layer(GemmaLayer):
    """See `DecoderLayer`."""

    def __init__(self, blank: BlankWeights, index: int, rope: int) -> None:
        super().__init__(blank, index, rope)
        config, self._index = blank.config, index
        self._scalar = torch.empty(1, dtype=blank.dtype, device=blank.device)
        norms = iter(self._further_norms)
        self._experts: Gemma4Experts | None = None
        if config.moe is not None:
            self._beside_norm, before, self._experts_norm = next(norms), next(norms), next(norms)
            self._experts = Gemma4Experts(blank, config.moe, before)
        self._input_mlp: LayerInputMlp | None = None
        if config.layer_inputs is not None:
            self._input_mlp, self._input_norm = LayerInputMlp(blank, config.layer_inputs.size), next(norms)

    @property
    def mixture(self) -> Mixture | None:
        return self._experts

    def _new_attention(self, blank: BlankWeights, rope: int, sliding_window: int | None) -> Attention:
        return Gemma4Attention(blank, rope, sliding_window)

    def _new_mlp(self, blank: BlankWeights, index: int) -> GatedMlp | PlainMlp | Mixture:
        # Experts are beside it.
        return new_mlp(blank)

    def feed_forward(self, branch: Tensor, residual: Tensor, step: Step) -> Tensor:
        made = self.mlp(self.mlp_norm.of_sum(branch, residual))
        if self._experts is not None:
            made = self._beside_norm(made) + self._experts_norm(self._experts(residual))
        made = self.post_mlp_norm(made)
        if self._input_mlp is not None:
            assert step.layer_inputs is not None
            made = self._input_norm(self._input_mlp(residual.add_(made), step.layer_inputs[:, self._index]))
        residual.mul_(self._scalar)
        return made.mul_(self._scalar)

    def projections(self) -> Iterator[Linear]:
        yield from super().projections()
        for part in (self._experts, self._input_mlp):
            if part is not None:
                yield from part.projections()

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().weight_slots(prefix)
        for part in (self._experts, self._input_mlp):
            if part is not None:
                yield from part.weight_slots(prefix)
        yield WeightSlot(f"{prefix}.layer_scalar", self._scalar)


class Gemma4Experts(ExpertsMlp):
    """Called with the residual stream, of which router and experts have norms of their own; each weighs as it says."""

    def __init__(self, blank: BlankWeights, moe: MoeConfig, norm: RmsNorm | LayerNorm) -> None:
        super().__init__(blank, moe)
        self._norm, self._config = norm, blank.config
        self._router_norm = blank.norm(blank.config.hidden_size)
        self._factors = torch.empty(moe.num_experts, dtype=blank.dtype, device=blank.device)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, hidden_size]. Returns the same shape."""
        logits = self.router(rms_norm(x, self._router_norm, self._config.rms_norm_eps))
        scaled = logits * self._config.hidden_size**-0.5
        ids, shares = choose_experts(scaled, self._moe.num_experts_per_tok, self._moe.norm_topk_prob)
        return self._ranks.sum(self.mix(self._norm(x), ids, shares * self._factors[ids]))

    def weight_slots(self, prefix: str) -> Iterator[WeightSlot]:
        yield from super().weight_slots(prefix)
        yield WeightSlot(f"{prefix}.router.scale", self._router_norm)
        yield WeightSlot(f"{prefix}.router.per_expert_scale", self._factors)


class Gemma4Attention(Attention):
    """With a norm for each value head, which has no weights. Some layers have queries alone, for others' keys."""

    @cached_property
    def _ones(self) -> Tensor:
        assert self.key_norm is not None
        return torch.ones_like(self.key_norm)

    def project(self, x: Activations) -> Tensor:
        """See `Attention`. The last columns are what values are made of, or keys, of which values are made as well."""
        projected = self.qkv(x)
        if self._config.kv_source is not None:
            return projected
        made = projected[:, -self._sizes[2] :]
        heads = made.reshape(-1, self._config.head_dim)
        values = rms_norm(heads, self._ones, self._config.rms_norm_eps).view(len(projected), -1)
        if self._config.keys_are_values:
            return torch.cat((projected, values), dim=1)
        made.copy_(values)
        return projected

    def _queries(self, qkv: Tensor, key_cache: Tensor, value_cache: Tensor, step: Step) -> Tensor:
        if self._config.kv_source is None:
            return super()._queries(qkv, key_cache, value_cache, step)
        assert self.query_norm is not None
        head_dim = self._config.head_dim
        normed = rms_norm(qkv.view(-1, head_dim), self.query_norm, self._config.rms_norm_eps)
        return apply_rotary(normed.view(len(qkv), -1, head_dim), *step.rotary[self._rope])

    def _kv_scale_slots(self, prefix: str) -> Iterator[WeightSlot]:
        if (source := self._config.kv_source) is not None:
            names = self._config.names
            prefix = f"{names.layers}.{source}.{names.attention}"
        yield from super()._kv_scale_slots(prefix)
