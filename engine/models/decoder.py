"""A decoder around its layers: embedding, rotary tables, head, and its weights' way in."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import embedding

from ...kernels.linear import Linear
from ...kernels.paged_attention import AttentionMetadata
from ..checkpoints.cut import OF_MATRIX
from ..checkpoints.model_config import ModelConfig
from ..checkpoints.weights import WeightSlot, draw_weights, load_weights
from ..sharding.ranks import ALONE, Ranks
from ..sharding.shard import Shard
from ..sharding.stages import stage_model
from ..vision.encoder import SeenImages
from ..vision.tower import VisionTower
from .blocks import BlankWeights, Step
from .head import Head
from .last_tokens import LastTokens
from .layer import NewLayer
from .layer_inputs import LayerInputs
from .layer_states import LayerStates
from .rope import by_axis, query_factors, rotary_factors

# What quantised checkpoints hold beside their weights that is not read: scales of activations that were fixed
# beforehand (they are measured row by row here), and what says nothing.
_UNREAD_SUFFIXES = (
    *(".input_scale", ".input_zero_point", ".output_scale", "activation_scale"),
    *(".weight_zero_point", ".g_idx", ".weight_shape", ".input_global_scale"),
)
# In the place of keys and values, of layers that keep nothing.
_NOTHING = (torch.empty(0), torch.empty(0))


class Decoder:
    """Weights and forward pass. The KV cache belongs to the caller. `parts`: its projections by their names on disk.

    `vision`: what it sees images with, if it does; no part of that is shared. `ranks`: with whom the rest is; raises
    `ConfigError` where it cannot be. Of a stage of it this has the layers alone, and at the ends what stands before or
    after them.
    """

    def __init__(
        self,
        config: ModelConfig,
        max_model_len: int,
        make_layer: NewLayer,
        dtype: torch.dtype,
        device: torch.device,
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks = ranks
        config = stage_model(config, ranks.stage, ranks.num_stages)
        self._shard = Shard(ranks.rank, ranks.size, config) if ranks.size > 1 else None
        config = self._shard.local if self._shard is not None else config
        self.config = config
        self.dtype, self._device = dtype, device
        self.stage = config.stage
        blank = BlankWeights(config, dtype, device, ranks=ranks)
        self.parts = blank.parts
        of_layers = [config.of_layer(index) for index in range(config.num_hidden_layers)]
        turns = [(rope, layer.rotary_dim) for rope, layer in zip(config.ropes, of_layers, strict=True)]
        kinds = list(dict.fromkeys(turns))
        self._rotary = [rotary_factors(*kind, max_model_len).to(device=device, dtype=dtype) for kind in kinds]
        growth = None if config.query_growth is None else query_factors(config.query_growth, max_model_len)
        self._query_factors = None if growth is None else growth.to(device=device, dtype=dtype).view(-1, 1, 1)
        is_tied = config.tie_word_embeddings
        embeds = self.stage.is_first or (self.stage.is_last and is_tied)
        self._embedding = blank.matrix(config.vocab_size, config.hidden_size) if embeds else None
        self._layers = [
            make_layer(replace(blank, config=layer).within(self._layer_name(index)), index, kinds.index(kind))
            for index, (layer, kind) in enumerate(zip(of_layers, turns, strict=True))
        ]
        self._kv_places = config.kv_places
        # From there on nothing is kept of tokens.
        keeping = (
            index for index, layer in enumerate(of_layers) if layer.kv_source is None and config.has_mixer(index)
        )
        self._last_keeping = max(keeping)
        inputs = config.layer_inputs
        self._layer_inputs = None if inputs is None else LayerInputs(blank, inputs)
        self._head = Head(blank, self._embedding if is_tied else None) if self.stage.is_last else None
        self.vision = None if config.vision is None else VisionTower(config.vision, dtype, device)
        self._axes = torch.tensor(config.mrope_axes, dtype=torch.int64, device=device)
        # Rounded as the weights are, as Gemma was trained.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=dtype).item()

    def load(self, elsewhere: Sequence[str] = ()) -> None:
        """Fill the weights from the checkpoint's folder; those named `elsewhere` are other stages'.

        Raises `ModelError` naming the tensor that does not fit.
        """
        # A tied checkpoint may carry the shared matrix a second time under the head's name.
        ignored = (*elsewhere, *(["lm_head.weight"] if self.config.tie_word_embeddings else ()))
        unread = _UNREAD_SUFFIXES if self.config.quantization else ()
        config = self.config
        load_weights(config.path, self.weight_slots(), ignored, unread, config.unread_parts, config.other_names)

    @property
    def num_parameters(self) -> int:
        """Of the embedding and of every matrix that is multiplied by, norms and biases left out."""
        layers = self._projections()
        head = () if self._head is None else self._head.projections()
        sizes: list[int] = [each.num_outputs * each.num_inputs for each in (*head, *layers)]
        return (0 if self._embedding is None else self._embedding.numel()) + sum(sizes)

    def draw(self, seed: int, whole: Sequence[WeightSlot] = ()) -> None:
        """Fill the weights at random. `whole`: for a stage, the slots of all, which draw the same model together."""
        own = {slot.name: slot for slot in self.weight_slots()}
        slots = [own.get(slot.name, slot) for slot in whole]
        draw_weights(slots or self.weight_slots(), seed, self._device)

    def prepack(self, quantization: str | None = None) -> None:
        """Bring the filled weights into the layout that is fastest here; they cannot be filled again after that.

        With `quantization="int8"` the layers' projections become int8. The head does not, as in vLLM.
        """
        if self._head is not None:
            self._head.matrix.prepack()
        if self._layer_inputs is not None:
            self._layer_inputs.projection.prepack()
        for layer in self._layers:
            for projection in layer.projections():
                projection.prepack(int8=quantization == "int8")
            if layer.mixture is not None:
                layer.mixture.stack()

    def scratch_bytes(self, num_tokens: int) -> int:
        """The most that a layer's product of so many tokens takes for a moment; see `Product.scratch_bytes`."""
        return max((each.scratch_bytes(num_tokens, self.dtype) for each in self._projections()), default=0)

    def _projections(self) -> Iterator[Linear]:
        if self._layer_inputs is not None:
            yield self._layer_inputs.projection
        for layer in self._layers:
            yield from layer.projections()

    @property
    def calls_experts(self) -> bool:
        """Whether the host has to know which experts have which tokens, to call them one by one."""
        mixtures = (layer.mixture for layer in self._layers)
        return any(mixture is not None and mixture.stacked is None for mixture in mixtures)

    def weight_slots(self) -> Iterator[WeightSlot]:
        """Every weight under the name that a checkpoint gives it."""
        yield from self._own_slots() if self._shard is None else self._shard.cut(self._own_slots())
        if self.vision is not None:
            yield from self.vision.weight_slots()

    def _own_slots(self) -> Iterator[WeightSlot]:
        if self._embedding is not None:
            yield WeightSlot(f"{self.config.names.embedding}.weight", self._embedding, axes=OF_MATRIX)
        if self._layer_inputs is not None:
            yield from self._layer_inputs.weight_slots()
        if self._head is not None:
            yield from self._head.weight_slots()
        for index, layer in enumerate(self._layers):
            yield from layer.weight_slots(self._layer_name(index))

    def _layer_name(self, index: int) -> str:
        return f"{self.config.names.layers}.{self.stage.first_layer + index}"

    def embed(self, token_ids: Tensor) -> Tensor:
        """What tokens are to the first layer: [num_tokens, hidden_size]. Of the first stage."""
        assert self._embedding is not None
        embedded = embedding(token_ids, self._embedding) if self._shard is None else self._embed_own(token_ids)
        if self._embedding_scale != 1:
            embedded *= self._embedding_scale
        return embedded

    def _embed_own(self, token_ids: Tensor) -> Tensor:
        """Of each token one rank has the embedding: the others add zeros."""
        assert self._shard is not None
        assert self._embedding is not None
        start, end = self._shard.words
        are_others = (token_ids < start) | (token_ids >= end)
        own = embedding((token_ids - start).masked_fill_(are_others, 0), self._embedding)
        return self._ranks.sum(own.masked_fill_(are_others.unsqueeze(1), 0))

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv_caches: Sequence[Tensor],
        slots: Tensor,
        metadata: AttentionMetadata,
        last_tokens: LastTokens | None = None,
        images: SeenImages | None = None,
        states: LayerStates | None = None,
    ) -> Tensor:
        """Compute a batch of new tokens; writes their keys and values into `kv_caches`.

        token_ids, positions, slots: [num_tokens] int64; positions may be [3, num_tokens], by time, height and width.
        kv_caches: as `kv_shapes` says, one for each of the model's `kv_groups`. `images`: those that have some of the
        tokens. `states`: of the layers that have no keys and values, changed in place. Returns [num_tokens,
        hidden_size], before the final norm, or of the `last_tokens` alone: [num_last, hidden_size]. A stage takes over
        what the one before it returns, and hands on what it returns.
        """
        # The embedding is the first branch that joins the residual stream.
        branch = self._opening(token_ids)
        if images is not None and self.stage.is_first:
            images.put(branch)
        inputs = self._inputs(token_ids, branch, images)
        residual = torch.zeros_like(branch)
        if positions.ndim == 2 and not self.config.mrope_axes:
            # Of tokens, whatever images there are.
            positions = positions[0]
        # Taken apart once a step: a view of a tensor costs the host a microsecond or two.
        rotary = [self._factors(table, positions).unbind() for table in self._rotary]
        growth = None if self._query_factors is None else self._query_factors[positions]
        of_states = None if states is None else states.slots
        step = Step(rotary, slots, metadata, query_factors=growth, states=of_states, layer_inputs=inputs)
        if states is not None and self.config.falcon_h1 is not None:
            step = replace(step, states_beside=states.of_layers())
        caches = self._caches(kv_caches, states)
        for index, (layer, (key_cache, value_cache)) in enumerate(zip(self._layers, caches, strict=True)):
            if last_tokens is not None and self.stage.is_last and index == self._last_keeping:
                step = replace(step, metadata=last_tokens.attention, wanted=last_tokens.index)
            attended = layer.attend(branch, residual, key_cache, value_cache, step)
            if step.wanted is not None:
                residual = residual[step.wanted]
                step = step.of_wanted()
            branch = layer.feed_forward(attended, residual, step)
            if images is not None:
                images.add(self.stage.first_layer + index, residual)
        hidden = residual.add_(branch)
        if not self.stage.is_last:
            self._ranks.hand_on(hidden)
        return hidden

    def _caches(self, kv_caches: Sequence[Tensor], states: LayerStates | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Each layer's keys and values, or what it has in their place."""
        # Where there is one row, it is both.
        of_groups = [list(zip(cache[0].unbind(), cache[-1].unbind(), strict=True)) for cache in kv_caches]
        of_others = iter(() if states is None else states.of_layers())
        for index, place in enumerate(self._kv_places):
            if place is not None:
                yield of_groups[place[0]][place[1]]
            else:
                yield next(of_others) if self.config.has_state(index) else _NOTHING

    def _opening(self, token_ids: Tensor) -> Tensor:
        if self.stage.is_first:
            return self.embed(token_ids)
        room = torch.empty(len(token_ids), self.config.hidden_size, dtype=self.dtype, device=self._device)
        return self._ranks.take_over(room)

    def _inputs(self, token_ids: Tensor, embedded: Tensor, images: SeenImages | None) -> Tensor | None:
        """Each layer's own, of a model whose layers have some."""
        if self._layer_inputs is None:
            return None
        if images is not None and self.vision is not None:
            token_ids = images.hide(token_ids, self.vision.config.layer_input_token_id)
        return self._layer_inputs(token_ids, embedded)

    def _factors(self, table: Tensor, positions: Tensor) -> Tensor:
        """[2, num_tokens, rotary_dim / 2]: the positions' cosines and sines."""
        factors = table[:, positions]
        if positions.ndim == 1:
            return factors
        return by_axis(factors, self._axes)

    def normed(self, hidden: Tensor) -> Tensor:
        """After the final norm. hidden: [n, hidden_size] as the last stage's `forward` gave it."""
        assert self._head is not None
        return self._head.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: what `normed` takes. Returns what `logits_of_normed` does."""
        return self.logits_of_normed(self.normed(hidden))

    def logits_of_normed(self, normed: Tensor) -> Tensor:
        """normed: what `normed` returns. Returns [n, vocab_size] in the model's dtype, or float32.

        Where ranks share the model, the first one gets that, and the others their own part of it.
        Whoever computes with them widens what is needed: the largest of a row can be found without.
        """
        assert self._head is not None
        logits = self._head.matrix(normed)
        if self._shard is not None:
            logits = self._ranks.join_columns(logits, self._shard.num_words)
        if self.config.logits_scaling != 1:
            logits = logits.div_(self.config.logits_scaling)
        cap = self.config.final_soft_cap
        return logits if cap is None else logits.float().div_(cap).tanh_().mul_(cap)
