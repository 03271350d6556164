"""One step on the device: the model, its KV cache, and where they live."""

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...kernels.device import runs_triton
from ...kernels.linear import supports_int8
from ...kernels.paged_attention import AttentionMetadata
from ...kernels.recurrent_states import StateSlots
from ..checkpoints.model_config import ModelConfig
from ..checkpoints.quantization_schemes import QuantizationConfig
from ..config import EngineConfig
from ..errors import ConfigError, message_of
from ..kv_cache.kv_memory import KVMemory
from ..kv_cache.state_memory import StateMemory
from ..kv_cache.swap import PreemptionCosts
from ..lora.adapter import adaptable
from ..lora.adapters import LoraAdapters
from ..lora.installed import InstalledAdapters
from ..models import Decoder, load_model
from ..sharding.ranks import ALONE, Ranks
from ..sharding.stages import own_model
from ..transfer import to_device
from ..vision.encoder import ImageEncoder
from .batch import Batch
from .cuda_graphs import Capture, CudaCapture, CudaGraphs, Forward, GraphLimits
from .devices import resolve_device, resolve_dtype, resolve_kv_cache_dtype
from .gpu_checks import require_attention, warn_of_widened_weights
from .host_memory import give_back_freed_memory, keep_freed_memory
from .image_batch import with_spans
from .memory_budget import NO_SECOND_MODEL, MemoryBudget, SecondModel, fitting
from .micro_batches import micro_batches, num_micro_batches
from .runner import OtherProcesses

logger = logging.getLogger(__name__)


class ModelRunner:
    """Owns the weights, the KV cache and the sequences' states, if the model has such: `num_states` of them.

    `second`: what a model beside it takes that is loaded already.
    Where it is one of several `ranks`, it owns its share of both, or of a stage of layers.
    """

    processes: OtherProcesses | None = None

    def __init__(
        self,
        model_config: ModelConfig,
        config: EngineConfig,
        second: SecondModel = NO_SECOND_MODEL,
        ranks: Ranks = ALONE,
    ) -> None:
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        self.device = resolve_device(config.device)
        if self.device.type == "cpu":
            keep_freed_memory()
        self.dtype = resolve_dtype(config.dtype, model_config.checkpoint_dtype, self.device)
        require_attention(model_config, self.dtype, self.device)
        require_quantization(config.quantization, self.dtype, self.device, model_config.quantization)
        warn_of_widened_weights(model_config.quantization, self.dtype, self.device)
        self.vocab_size = model_config.vocab_size
        windows = model_config.sliding_windows
        vision = model_config.vision
        # An image that is not to be cut may be more than a window leaves room for.
        keeps_all = None in windows or (vision is not None and vision.is_two_way)
        self.sliding_window = None if keeps_all else max(window for window in windows if window is not None)
        kv_dtype = resolve_kv_cache_dtype(config.kv_cache_dtype, self.dtype, self.device)
        self._num_stages = ranks.num_stages
        share = own_model(model_config, ranks.stage, ranks.num_stages, ranks.rank, ranks.size)
        budget = MemoryBudget(share, config, self.dtype, kv_dtype, self.device, second, ranks, vision)
        stated_num_blocks = budget.stated_num_blocks()
        with fitting("the model"):
            self._model = load_model(model_config, config, self.dtype, self.device, ranks)
            self._model.prepack(config.quantization)
            give_back_freed_memory()
            self._make_place_for_adapters(config)
        tower = self._model.vision
        self.images = None if tower is None else ImageEncoder(tower, config.max_kept_vectors)
        self.preemption_costs = preemption_costs(ranks.num_stages * self._model.num_parameters, self.device)
        ranks.meet()
        num_blocks, self.num_states = budget.caches(self._model, stated_num_blocks)
        self._kv_dtype = kv_dtype
        self._states: StateMemory | None = None
        if self.num_states:
            with fitting(f"{self.num_states} states of sequences"):
                self._states = StateMemory(share, self.num_states, self.dtype, self.device)
        self.keeps_hidden = False
        self._kept_hidden: Tensor | None = None
        self.hold(num_blocks, share, config)

    def _make_place_for_adapters(self, config: EngineConfig) -> None:
        self.adapters: InstalledAdapters | None = None
        self.loras: LoraAdapters | None = None
        if config.enable_lora:
            parts = adaptable(self._model.parts)
            self.adapters = InstalledAdapters(parts, config, self.dtype, self.device)
            # Of a model that is shared, one process reads them for all.
            if config.world_size == 1:
                self.loras = LoraAdapters(parts, config, self.dtype, self.adapters.install)

    def hold(self, num_blocks: int, model_config: ModelConfig, config: EngineConfig) -> None:
        """Have so many KV blocks, all zero, and graphs that use them, instead of those there were."""
        self._graphs: CudaGraphs | None = None
        with fitting(f"a KV cache of {num_blocks} blocks"):
            self.memory = KVMemory(model_config, num_blocks, config.block_size, self._kv_dtype, self.device)
        if wants_graphs(config, self.device, self._model.calls_experts) and runs_triton(self.memory.caches[0]):
            try:
                self.use_graphs(CudaCapture(self.device), model_config, config)
            except RuntimeError as error:
                logger.warning("no CUDA graphs, steps run eagerly: %s", message_of(error))

    @torch.inference_mode()
    def use_graphs(self, capture: Capture, model_config: ModelConfig, config: EngineConfig) -> None:
        """Compute small steps with what `capture` makes of the forward pass."""
        limits = GraphLimits.of(config, model_config, self.device)
        forward = _forward_into(self._model, self.memory.caches, self._states)
        slots = None if self.adapters is None else self.adapters.slots
        has_states = self._states is not None
        self._graphs = CudaGraphs(forward, limits, self.device, capture, slots, has_states)

    @property
    def num_captures(self) -> int:
        """How many CUDA graphs were captured, those that were made again included."""
        return 0 if self._graphs is None else self._graphs.num_captures

    @torch.inference_mode()
    def execute(self, batch: Batch) -> Tensor:
        """Compute the batch's tokens; returns the logits of its `last_token_index`: [num_sampling, vocab].

        Its prompt reader, if it has one, is shown the logits it wants. A stage but the last returns what it
        hands on; of a step in parts, of the last one.
        """
        if self._graphs is not None and self._fits_graphs(batch):
            return self._wanted_logits(batch, self._graphs.forward(batch), is_normed=True)
        if (number := num_micro_batches(batch, self._num_stages)) > 1:
            batch = replace(batch, last_tokens=None)
            hidden = self._forward_in_parts(batch, number)
        else:
            hidden = self._forward(batch)
        if not self._model.stage.is_last:
            return hidden
        if batch.last_tokens is not None:
            return self._logits(self._model.normed(hidden[batch.last_tokens.sampled]))
        return self._wanted_logits(batch, hidden, is_normed=False)

    def _forward_in_parts(self, batch: Batch, number: int) -> Tensor:
        computed = [self._forward(part) for part in micro_batches(batch, number)]
        # Elsewhere each has been handed on: logits are made at the last stage.
        return torch.cat(computed) if self._model.stage.is_last else computed[-1]

    def _wanted_logits(self, batch: Batch, hidden: Tensor, is_normed: bool) -> Tensor:
        """hidden: of all the batch's tokens, with or without the final norm."""

        def normed(part: Tensor) -> Tensor:
            return part if is_normed else self._model.normed(part)

        if batch.prompt_reader is not None:
            logits = self._model.logits_of_normed
            batch.prompt_reader.read(lambda index: logits(normed(hidden[index])), self.vocab_size, self.device)
        return self._logits(normed(batch.wanted(hidden)))

    def _logits(self, normed: Tensor) -> Tensor:
        self._kept_hidden = normed if self.keeps_hidden else None
        return self._model.logits_of_normed(normed)

    @torch.inference_mode()
    def kept_hidden(self, rows: Tensor) -> Tensor:
        """The hidden states after the final norm, [n, hidden_size], of these rows of the last step's logits.

        Of a runner that `keeps_hidden`, before its next step writes over them.
        """
        assert self._kept_hidden is not None
        return self._kept_hidden[rows]

    def _fits_graphs(self, batch: Batch) -> bool:
        """They know nothing of images, and of adapters those that have slots."""
        has_slots = self.adapters is not None and self.adapters.slots is not None
        return batch.images is None and (batch.adapters is None or has_slots)

    def _forward(self, batch: Batch) -> Tensor:
        """Kernel by kernel."""
        if batch.adapters is not None and self.adapters is not None:
            numbers, last = batch.adapters, batch.last_tokens
            with self.adapters.applied(numbers, None if last is None else last.index):
                return self._forward(replace(batch, adapters=None))
        positions, images, attention = batch.positions, None, batch.attention
        if batch.images is not None:
            attention = with_spans(attention, batch.images)
            positions = to_device(batch.images.positions, self.device)
            # A stage may have nothing to see with.
            images = None if self.images is None else self.images.see(batch.images.pieces)
        states = None if self._states is None or batch.states is None else self._states.of(batch.states)
        return self._model.forward(
            batch.token_ids,
            positions,
            self.memory.caches,
            batch.slots,
            attention,
            batch.last_tokens,
            images,
            states,
        )


def _forward_into(model: Decoder, kv_caches: Sequence[Tensor], states: StateMemory | None) -> Forward:
    """The forward pass without its runner: a runner that is part of a cycle would keep the GPU's memory for a while.

    The final norm is part of it, which is one launch less that each step waits for.
    """

    def forward(
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        attention: AttentionMetadata,
        state_slots: StateSlots | None,
    ) -> Tensor:
        layer_states = None if states is None or state_slots is None else states.of(state_slots)
        return model.normed(model.forward(token_ids, positions, kv_caches, slots, attention, states=layer_states))

    return forward


def wants_graphs(config: EngineConfig, device: torch.device, calls_experts: bool) -> bool:
    """Whether small steps are to be computed with CUDA graphs; a line of the log says where a model cannot be.

    calls_experts: see `Decoder`.
    """
    if config.enforce_eager or device.type != "cuda":
        return False
    if config.world_size > 1:
        logger.info("no CUDA graphs with %s", config.parallel_options)
        return False
    if calls_experts:
        logger.info("no CUDA graphs: the host calls the model's experts one by one")
        return False
    return True


def preemption_costs(num_parameters: int, device: torch.device) -> PreemptionCosts:
    """What it takes to get KV back on such a device, to within a factor of two or so.

    Rates that models reach in prefill and copies of scattered blocks over PCIe 5, and on two CPU cores.
    """
    flops_per_second, bytes_per_second = (3e14, 2e10) if device.type == "cuda" else (3e11, 5e9)
    return PreemptionCosts(
        seconds_per_token=2 * num_parameters / flops_per_second,
        seconds_per_byte=1 / bytes_per_second,
        seconds_per_swap=1e-4,
    )


def require_quantization(
    quantization: str | None, dtype: torch.dtype, device: torch.device, checkpoint: QuantizationConfig | None = None
) -> None:
    """Raises `ConfigError` where int8 would be computed the long way round, or the checkpoint is quantised already.

    Whoever asks for it wants speed: a model many times slower is a worse answer than one line that says why.
    """
    if quantization is not None and checkpoint is not None:
        raise ConfigError(
            f"quantization {quantization} is for weights as they were trained, and the checkpoint's are quantised "
            f"({checkpoint.method}): leave it out"
        )
    if quantization == "int8" and not supports_int8(dtype, device):
        raise ConfigError(
            "quantization int8 needs the compiled kernels and a CPU: with AVX2 for dtype float32, with AVX-512's "
            "bfloat16 for that; "
            f"here are {device.type} and {str(dtype).removeprefix('torch.')}: leave it out"
        )
