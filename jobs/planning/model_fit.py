"""How much of a GPU's memory a model leaves for its KV cache, and how many GPUs' memory it takes. Free of torch."""

import re
from dataclasses import dataclass
from pathlib import Path

from ...engine.checkpoints.model_config import ModelConfig
from ...engine.checkpoints.model_size import kv_token_bytes, layer_projections, num_parameters, weight_bytes
from ...engine.config import EngineConfig
from ...engine.sharding.shares import local_model
from ..errors import SpecError

GIB = 2**30
# What programs are given of it, in GiB.
GPU_GIB = {"h200": 139.8, "h100": 79.2, "a100": 79.2, "a100-40gb": 39.4, "l40s": 44.4, "4090": 23.5, "l4": 22.0}
_GIVEN = re.compile(r"(\d+(?:\.\d+)?)\s*(?:gib|gb|g)", re.IGNORECASE)
# What the driver and torch's own libraries take, about; and a captured graph a layer, which there are a few dozen of.
_DRIVER_BYTES = GIB // 2
_GRAPH_BYTES_PER_LAYER = 20 * 2**20
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
            raise SpecError(f"--gpu must be one of {', '.join(GPU_GIB)}, or memory such as 24GiB, not {text!r}")
        return cls(text, int(float(given[1]) * GIB))


@dataclass(frozen=True)
class ModelNeeds:
    """What a model, or the share of it that each of `tensor_parallel_size` GPUs has, takes of a GPU's memory.

    `parameters`: of the whole. `sequence_tokens`: the longest sequence. `beside_bytes`: about what the largest step,
    CUDA graphs and the driver take; a worker measures it.
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

    @classmethod
    def of(cls, folder: Path, options: EngineConfig) -> "ModelNeeds":
        """Reads `config.json` alone.

        Raises `ModelError`, `SpecError` where the model's context is shorter, or `ConfigError` where so many GPUs
        cannot share it.
        """
        model = ModelConfig.from_pretrained(folder)
        context, asked = model.max_position_embeddings, options.max_model_len
        if asked is not None and asked > context:
            raise SpecError(f"--max-model-len {asked} exceeds the model's context of {context} tokens")
        dtype = model.checkpoint_dtype if options.dtype == "auto" else options.dtype
        item_bytes = 4 if dtype == "float32" else 2
        size = options.tensor_parallel_size
        share = local_model(model, 0, size) if size > 1 else model
        has_own_kv = options.kv_cache_dtype != "auto"
        return cls(
            parameters=num_parameters(model),
            dtype=dtype,
            kv_dtype=options.kv_cache_dtype if has_own_kv else dtype,
            weight_bytes=weight_bytes(share, item_bytes, options.quantization),
            kv_token_bytes=kv_token_bytes(share, 1 if has_own_kv else item_bytes),
            beside_bytes=_beside_bytes(share, options, item_bytes, model.vocab_size),
            sequence_tokens=asked or context,
            block_tokens=options.block_size,
            utilization=options.gpu_memory_utilization,
            tensor_parallel_size=size,
        )

    @property
    def sequence_blocks(self) -> int:
        return -(-self.sequence_tokens // self.block_tokens)

    @property
    def sequence_bytes(self) -> int:
        return self.sequence_blocks * self.block_bytes

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
        return self.num_blocks // self.needs.sequence_blocks

    def num_gpus(self, num_sequences: int) -> int | None:
        """How many such GPUs it takes for so many of the longest sequences; None: no number of them is enough.

        Each has the whole model, or as many as share one. Where that and a sequence do not fit, how many have enough
        memory together.
        """
        if self._usable_bytes <= 0:
            return None
        size = self.needs.tensor_parallel_size
        if self.num_sequences:
            return size * -(-num_sequences // self.num_sequences)
        needed = self.needs.weight_bytes + num_sequences * self.needs.sequence_bytes + self.needs.block_bytes
        return -(-size * needed // self._usable_bytes)

    @property
    def _usable_bytes(self) -> int:
        return int(self.gpu.memory_bytes * self.needs.utilization) - self.needs.beside_bytes


def _beside_bytes(model: ModelConfig, options: EngineConfig, item_bytes: int, num_words: int) -> int:
    num_tokens = options.max_num_batched_tokens
    # The residual, its norm and a branch of it, and what the widest part of a layer makes of them.
    wide = max(_outputs(model, index) for index in range(model.num_hidden_layers))
    step = num_tokens * (3 * model.hidden_size + wide) * item_bytes
    logits = min(options.max_num_seqs, num_tokens) * num_words * _LOGIT_BYTES
    graphs = (
        0
        if options.enforce_eager or options.tensor_parallel_size > 1
        else _GRAPH_BYTES_PER_LAYER * model.num_hidden_layers
    )
    return _DRIVER_BYTES + step + logits + graphs


def _outputs(model: ModelConfig, index: int) -> int:
    """Of a token in a layer; of experts only those that it has."""
    chosen = 0 if model.moe is None else model.moe.num_experts_per_tok
    return sum(each.num_outputs * min(each.copies, chosen or 1) for each in layer_projections(model, index))
