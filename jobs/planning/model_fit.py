"""How much of a GPU's memory a model leaves for its KV cache, and how many GPUs' memory it takes. Free of torch."""

import re
from dataclasses import dataclass
from pathlib import Path

from ...engine.checkpoints.model_config import ModelConfig
from ...engine.checkpoints.model_size import (
    KEPT_STATES,
    kv_token_bytes,
    layer_projections,
    num_parameters,
    state_bytes,
    weight_bytes,
)
from ...engine.checkpoints.vision_config import VisionConfig
from ...engine.checkpoints.vision_size import encode_bytes
from ...engine.config import EngineConfig
from ...engine.execution.graph_sizes import graph_sizes, max_graphs
from ...engine.sharding.stages import stage_shares
from ...storage.errors import Argument
from ..errors import SpecError
from .guess_needs import NO_GUESSER, GuessNeeds

GIB = 2**30
# What programs are given of it, in GiB.
GPU_GIB = {"h200": 139.8, "h100": 79.2, "a100": 79.2, "a100-40gb": 39.4, "l40s": 44.4, "4090": 23.5, "l4": 22.0}
_GIVEN = re.compile(r"(\d+(?:\.\d+)?)\s*(?:gib|gb|g)", re.IGNORECASE)
# What the driver and torch's own libraries take, about; and a captured graph a layer.
_DRIVER_BYTES = GIB // 2
_GRAPH_BYTES_PER_LAYER = 2**19
# Of a token in a graph: a row of what attention computes of it, its own and under three shared prefixes, in float32.
_PART_ROW_BYTES = 4 * 4
# Of attention in both directions, so many scores at a time: as `kernels.paged_attention.two_way` has it.
_MAX_SCORES = 2**24
# Of a token's logits while it is drawn: as they are computed, in float32, sorted, and with their places.
_LOGIT_BYTES = 24


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int

    @classmethod
    def of(cls, text: str) -> "Gpu":
        """One of `GPU_GIB`, or so much memory. Raises `SpecError`."""
        name = text.lower()
        if name in GPU_GIB:
            return cls(name, int(GPU_GIB[name] * GIB))
        if (given := _GIVEN.fullmatch(name)) is None or not float(given[1]):
            known = ", ".join(GPU_GIB)
            raise SpecError(Argument("gpu"), f" must be one of {known}, or memory such as 24GiB, not {text!r}")
        return cls(text, int(float(given[1]) * GIB))


@dataclass(frozen=True)
class ModelNeeds:
    """What a model, or the largest share of it that one of several GPUs has, takes of a GPU's memory.

    With what guesses for it. Of a pipeline's stages, which are not all alike, each figure is that of the one that takes
    most.
    `parameters`: of the whole. `sequence_tokens`: the longest sequence. `beside_bytes`: about what the largest step,
    CUDA graphs and the driver take; a worker measures it. `guessing`: what of it is a draft model's, or Medusa heads'.
    `state_bytes`: what a sequence takes whatever its length, of a model whose layers have states.
    """

    parameters: int
    dtype: str
    kv_dtype: str
    weight_bytes: int
    kv_token_bytes: int
    beside_bytes: int
    sequence_tokens: int
    block_tokens: int
    utilization: float
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    guessing: GuessNeeds = NO_GUESSER
    state_bytes: int = 0

    @classmethod
    def of(cls, folder: Path, options: EngineConfig) -> "ModelNeeds":
        """Reads `config.json` alone.

        Raises `ModelError`, `SpecError` where the model's context is shorter, or `ConfigError` where so many GPUs
        cannot share it, or what is to guess does not go together with it.
        """
        model = ModelConfig.from_pretrained(folder)
        context, asked = model.max_position_embeddings, options.max_model_len
        if asked is not None and asked > context:
            raise SpecError(Argument("max_model_len"), f" {asked} exceeds the model's context of {context} tokens")
        dtype = model.checkpoint_dtype if options.dtype == "auto" else options.dtype
        item_bytes = 4 if dtype == "float32" else 2
        size, stages = options.tensor_parallel_size, options.pipeline_parallel_size
        shares = stage_shares(model, size, stages)
        has_own_kv = options.kv_cache_dtype != "auto"
        guessing = GuessNeeds.of(model, options, item_bytes)
        own_weights = max(weight_bytes(share, item_bytes, options.quantization) for share in shares)
        own_kv = max(kv_token_bytes(share, 1 if has_own_kv else item_bytes) for share in shares)
        beside = max(_beside_bytes(share, model, options, item_bytes) for share in shares)
        return cls(
            parameters=num_parameters(model),
            dtype=dtype,
            kv_dtype=options.kv_cache_dtype if has_own_kv else dtype,
            weight_bytes=own_weights + guessing.weight_bytes,
            kv_token_bytes=own_kv + guessing.kv_token_bytes,
            beside_bytes=beside + _captured_bytes(guessing.num_layers, options),
            sequence_tokens=asked or context,
            block_tokens=options.block_size,
            utilization=options.gpu_memory_utilization,
            tensor_parallel_size=size,
            pipeline_parallel_size=stages,
            guessing=guessing,
            state_bytes=max(state_bytes(share, item_bytes) for share in shares),
        )

    @property
    def num_sharing(self) -> int:
        """How many GPUs have the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def sequence_blocks(self) -> int:
        return -(-self.sequence_tokens // self.block_tokens)

    @property
    def sequence_bytes(self) -> int:
        return self.sequence_blocks * self.block_bytes + self.state_bytes

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.kv_token_bytes


@dataclass(frozen=True)
class Fit:
    """A model in a GPU's memory, or a share of it."""

    gpu: Gpu
    needs: ModelNeeds

    @property
    def kv_bytes(self) -> int:
        """What is left for keys and values; 0 where the model does not fit."""
        return max(0, self._usable_bytes - self.needs.weight_bytes)

    @property
    def num_blocks(self) -> int:
        # One pads block tables.
        return max(0, self.kv_bytes // self.needs.block_bytes - 1)

    @property
    def kv_tokens(self) -> int:
        return self.num_blocks * self.needs.block_tokens

    @property
    def num_sequences(self) -> int:
        """Of the longest, at a time."""
        if not self.needs.state_bytes:
            return self.num_blocks // self.needs.sequence_blocks
        # States of prefixes are kept beside theirs, and all states get half of what is left at most.
        num_states = self.kv_bytes // 2 // self.needs.state_bytes - KEPT_STATES
        return max(0, min(num_states, self.kv_bytes // self.needs.sequence_bytes))

    def num_gpus(self, num_sequences: int) -> int | None:
        """How many such GPUs it takes for so many of the longest sequences; None: no number of them is enough.

        Each has the whole model, or as many as share one. Where that and a sequence do not fit, how many have enough
        memory together.
        """
        if self._usable_bytes <= 0:
            return None
        size = self.needs.num_sharing
        if self.num_sequences:
            return size * -(-num_sequences // self.num_sequences)
        needed = self.needs.weight_bytes + num_sequences * self.needs.sequence_bytes + self.needs.block_bytes
        return -(-size * needed // self._usable_bytes)

    @property
    def _usable_bytes(self) -> int:
        return int(self.gpu.memory_bytes * self.needs.utilization) - self.needs.beside_bytes


def _beside_bytes(share: ModelConfig, model: ModelConfig, options: EngineConfig, item_bytes: int) -> int:
    """Of a `share` of the model."""
    # The residual, its norm and a branch of it, and what the widest part of a layer makes of them.
    wide = max(_outputs(share, index) for index in range(share.num_hidden_layers))
    # Each layer's own input, and what it is made of.
    inputs = 0 if share.layer_inputs is None else 2 * share.num_hidden_layers * share.layer_inputs.size
    token_bytes = (3 * share.hidden_size + wide + inputs) * item_bytes
    logits = options.max_num_logits * model.vocab_size * _LOGIT_BYTES if share.stage.is_last else 0
    step = options.max_num_batched_tokens * token_bytes + logits
    encoding = kept = 0
    longest = options.longest_sequence(model.max_position_embeddings)
    if model.vision is not None and model.vision.is_two_way:
        # An image that is not to be cut may come on top of what a step may have.
        step += (model.vision.max_tokens - 1) * token_bytes
        step += _two_way_bytes(share, model.vision, longest, item_bytes)
    if (vision := share.vision) is not None:
        of_image = min(vision.max_tokens, longest)
        encoding = encode_bytes(vision, of_image, item_bytes)
        vectors = options.max_kept_vectors + vision.num_levels * of_image
        kept = vectors * vision.out_hidden_size * item_bytes
    return _DRIVER_BYTES + kept + max(step, encoding) + _graph_bytes(share, options, token_bytes)


def _two_way_bytes(share: ModelConfig, vision: VisionConfig, longest: int, item_bytes: int) -> int:
    """Of the layer where an image's tokens that see each other have most keys: these with values, and scores."""
    most = 0
    for index, window in enumerate(share.sliding_windows):
        if window is None and vision.two_way_layers == "windows":
            continue
        layer, num_keys = share.of_layer(index), min(longest, (window or longest) + vision.max_tokens)
        # Both in float32, made of what one of them is in the cache.
        numbers = num_keys * layer.num_key_value_heads * layer.head_dim
        scores = min(_MAX_SCORES, vision.max_tokens * layer.num_attention_heads * num_keys)
        most = max(most, numbers * (2 * 4 + item_bytes) + 2 * 4 * scores)
    return most


def _graph_bytes(model: ModelConfig, options: EngineConfig, token_bytes: int) -> int:
    """What graphs take, the largest by its tokens: their memory, and once more where each is tried first."""
    if not options.may_use_graphs or model.state_layers is not None:
        return 0
    value_dim = max(model.of_layer(index).value_dim for index in range(model.num_hidden_layers))
    parts = _PART_ROW_BYTES * model.num_attention_heads * (value_dim + 1)
    sizes = graph_sizes(options, model)
    captured = _captured_bytes(model.num_hidden_layers, options, len(sizes))
    return sizes[-1] * (2 * token_bytes + parts) + captured


def _captured_bytes(num_layers: int, options: EngineConfig, num_sizes: int = 1) -> int:
    """Of a draft model's graphs there are a few sizes: its steps are small."""
    return max_graphs(options, num_sizes) * _GRAPH_BYTES_PER_LAYER * num_layers if options.may_use_graphs else 0


def _outputs(model: ModelConfig, index: int) -> int:
    """Of a token in a layer; of experts only those that it has."""
    chosen = 0 if model.moe is None else model.moe.num_experts_per_tok
    # Heads' queries for latents, and what they see of these, are much longer than what they come from.
    absorbed = 0 if model.latent_attention is None else model.num_attention_heads * (model.head_dim + model.value_dim)
    return absorbed + sum(each.num_outputs * min(each.copies, chosen or 1) for each in layer_projections(model, index))
