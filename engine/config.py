"""What the engine may use. Frozen, checked once, free of torch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any

from .errors import ConfigError, shown
from .lora_request import LoRARequest
from .speculative.speculative_config import SpeculativeConfig

DTYPE_NAMES: tuple[str, ...] = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "dummy")
QUANTIZATIONS = ("int8",)
KV_CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
_COUNTS = (
    *("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_gpu_blocks_override", "block_size"),
    *("max_loras", "max_lora_rank", "tensor_parallel_size", "pipeline_parallel_size"),
)
# Python counts true and false among the numbers; here they are a mistake.
_KINDS: Mapping[type, tuple[type, str]] = {
    bool: (bool, "true or false"),
    int: (Integral, "a whole number"),
    float: (Real, "a number"),
}
# Of the numbers that tensors are measured in.
_MOST = 2**63 - 1
# Of what kernels count: in 32 bits.
_MOST_COUNTED = 2**31 - 1
# Of threads: the system ends a process that wants many more, without a word.
_MOST_THREADS = 4096
# A GPU's memory is set aside for a graph of each: 4 GiB for so many of a model of 32 layers.
MAX_GRAPH_SIZES = 256
# Of the host's memory, where nothing is said.
DEFAULT_KV_CACHE_BYTES = 2 * 1024**3


@dataclass(frozen=True)
class EngineConfig:
    """Limits and choices of one engine; the names are vLLM's.

    `num_gpu_blocks_override` fixes the number of KV blocks (of `block_size` tokens each); without it
    `kv_cache_memory_bytes` decides. Without either a CPU has 2 GiB of them, and a GPU as many as the share
    `gpu_memory_utilization` of its memory holds beside weights, activations and other processes. `kv_cache_dtype`:
    "fp8" (the same as "fp8_e4m3") and "fp8_e5m2" keep keys and values in 8 bits on a GPU, times the checkpoint's scales
    where it has such. `max_model_len` defaults to the model's `max_position_embeddings`.
    `swap_space_bytes`: how much of the host's memory preempted sequences may leave their KV in; by default none on a
    CPU and 4 GiB beside a GPU. `load_format="dummy"` reads no weights but draws them from `seed`: speed can be
    measured with a `config.json` alone. `quantization="int8"` computes the decoder layers' products in int8, weights
    quantised as they are loaded and activations as they come, on a CPU that has what it needs; the rest keeps `dtype`.
    `async_scheduling` launches a step before the last one's tokens are read, so that the device never waits for the
    host; by default beside a GPU.
    On a GPU steps of up to the largest of `cuda_graph_sizes` tokens (vLLM's `cudagraph_capture_sizes`; 256 at most) are
    padded to the next of them and computed with CUDA graphs, unless `enforce_eager`. By default up to `max_num_seqs`,
    and for a small model as far beyond, up to 8,192, as a step takes the host about as long as the GPU.
    `enable_lora`: requests may name a LoRA adapter, of a rank up to `max_lora_rank`, that is loaded when the first one
    does; those of `lora_modules` are loaded with the model, and memory is set aside for CUDA graphs of steps with
    adapters beside those without. `max_loras`: how many are held at a time; a GPU's memory for all of them is taken
    when the model is loaded.
    `speculative_config`: options of `SpeculativeConfig`, as {"method": "ngram", "num_speculative_tokens": 4}; without
    it no tokens are guessed. No answer depends on it: a guess counts where it is what is drawn.
    `tensor_parallel_size`: how many processes share the model, each with a GPU of its own, or on a CPU some of its
    cores; what is said of memory is said of each of them. It must divide the model's attention heads, and the key
    heads of layers with states. GPUs that share one run without CUDA graphs.
    `pipeline_parallel_size`: into how many stages of consecutive layers the model is split, each with as many processes
    as `tensor_parallel_size` says. They compute a step one after the other, which gives room rather than speed; a step
    of many tokens goes through in parts, of which each stage has another one at a time.
    """

    dtype: str = "auto"
    device: str = "auto"
    load_format: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    swap_space_bytes: int | None = None
    num_threads: int | None = None
    async_scheduling: bool | None = None
    enforce_eager: bool = False
    cuda_graph_sizes: Sequence[int] | None = None
    enable_lora: bool = False
    max_loras: int = 8
    max_lora_rank: int = 16
    lora_modules: Sequence[LoRARequest] = ()
    speculative_config: Mapping[str, Any] | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        self._require_types()
        _require_one_of("dtype", self.dtype, DTYPE_NAMES)
        if self.quantization is not None:
            reason = ": of a checkpoint that is quantised its config.json says how"
            _require_one_of("quantization", self.quantization, QUANTIZATIONS, ", or none", reason)
        _require_one_of("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        if not isinstance(self.device, str):
            raise ConfigError(f"device must be a text such as 'cpu' or 'cuda', not {shown(self.device)}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"gpu_memory_utilization must be above 0 and at most 1, not {shown(self.gpu_memory_utilization)}"
            )
        _require_one_of("load_format", self.load_format, LOAD_FORMATS)
        if self.block_size < 1 or self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two, not {shown(self.block_size)}")
        for name in _COUNTS:
            _require_count(name, getattr(self, name), _MOST_COUNTED)
        _require_count("num_threads", self.num_threads, _MOST_THREADS)
        _require_count("kv_cache_memory_bytes", self.kv_cache_memory_bytes, _MOST)
        if self.swap_space_bytes is not None and self.swap_space_bytes < 0:
            raise ConfigError(f"swap_space_bytes must be at least 0, not {shown(self.swap_space_bytes)}")
        if self.cuda_graph_sizes is not None:
            self._require_graph_sizes(self.cuda_graph_sizes)
        if self.world_size > 1:
            self._require_parallel()
        if not _is_list_of(LoRARequest, self.lora_modules):
            raise ConfigError(f"lora_modules must be a list of LoRARequest, not {shown(self.lora_modules)}")
        if self.lora_modules and not self.enable_lora:
            raise ConfigError("lora_modules need enable_lora=True")
        if self.speculative_config is not None:
            self._require_room_for_guesses(SpeculativeConfig.of(self.speculative_config))

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """How tokens are guessed, if they are."""
        return SpeculativeConfig.of(self.speculative_config) if self.speculative_config is not None else None

    @property
    def max_num_logits(self) -> int:
        """Of how many tokens a step may want logits: the last one of each sequence, and its guesses."""
        guesses = self.speculative.max_step_tokens(self.max_num_seqs) if self.speculative is not None else 0
        return min(self.max_num_seqs + guesses, self.max_num_batched_tokens)

    @property
    def max_kept_vectors(self) -> int:
        """How many of images' vectors are kept: of the prompts that a step cuts, and of images that are often there."""
        return 2 * self.max_num_batched_tokens

    def longest_sequence(self, max_position_embeddings: int) -> int:
        """How many tokens one may have, of a model with so many positions, where memory does not limit them."""
        return self.max_model_len or max_position_embeddings

    @property
    def may_use_graphs(self) -> bool:
        """Whether any step may be computed with CUDA graphs, on a GPU."""
        return not self.enforce_eager and self.world_size == 1

    @property
    def world_size(self) -> int:
        """How many processes have the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def parallel_options(self) -> str:
        """What makes them more than one, for messages."""
        return parallel_options(self.tensor_parallel_size, self.pipeline_parallel_size)

    def _require_types(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            for kind, (wanted, words) in _KINDS.items():
                may_be = field.type == kind or (field.type == kind | None and value is not None)
                if may_be and (not isinstance(value, wanted) or (isinstance(value, bool) and kind is not bool)):
                    raise ConfigError(f"{field.name} must be {words}, not {shown(value)}")
                if may_be and kind is int and abs(value) > _MOST:
                    raise ConfigError(f"{field.name} must be at most 2**63 - 1")

    def _require_room_for_guesses(self, speculative: SpeculativeConfig) -> None:
        guesses, room = speculative.num_speculative_tokens, self.max_num_batched_tokens
        if guesses >= room:
            raise ConfigError(
                f"speculative_config: num_speculative_tokens={guesses} and the token before them do not fit into a "
                f"step of max_num_batched_tokens={room}: lower num_speculative_tokens to {room - 1} or less, or raise "
                f"max_num_batched_tokens to {guesses + 1}"
            )

    def _require_parallel(self) -> None:
        """Refuse what cannot be split over several processes yet."""
        option = self.parallel_options
        if self.speculative is not None and self.speculative.method != "ngram":
            raise ConfigError(
                f"speculative_config with method {self.speculative.method} and {option} are not supported together: "
                "use ngram, or leave one of them out"
            )

    def _require_graph_sizes(self, sizes: Sequence[int]) -> None:
        if not _is_list_of(Integral, sizes):
            raise ConfigError(f"cuda_graph_sizes must be a list of whole numbers, not {shown(sizes)}")
        if not sizes:
            raise ConfigError("cuda_graph_sizes must name at least one size; enforce_eager=True turns CUDA graphs off")
        if (num_sizes := len(set(sizes))) > MAX_GRAPH_SIZES:
            raise ConfigError(
                f"cuda_graph_sizes must name at most {MAX_GRAPH_SIZES} sizes, as memory is set aside for each, "
                f"not {num_sizes}"
            )
        for size in sizes:
            if not 1 <= size <= self.max_num_batched_tokens:
                raise ConfigError(
                    f"cuda_graph_sizes must be between 1 and max_num_batched_tokens={self.max_num_batched_tokens}, "
                    f"not {size}"
                )


def _require_one_of(name: str, value: object, allowed: Sequence[str], otherwise: str = "", reason: str = "") -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}{otherwise}, not {shown(value)}{reason}")


def _is_list_of(kind: type, given: object) -> bool:
    return isinstance(given, Sequence) and all(isinstance(each, kind) for each in given)


def parallel_options(tensor_parallel_size: int, pipeline_parallel_size: int) -> str:
    """What makes a model's processes more than one, for messages; empty where nothing does."""
    sizes = {"tensor_parallel_size": tensor_parallel_size, "pipeline_parallel_size": pipeline_parallel_size}
    return " and ".join(f"{name}={size}" for name, size in sizes.items() if size > 1)


def _require_count(name: str, value: int | None, most: int) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} must be at least 1, not {shown(value)}")
    if value is not None and value > most:
        raise ConfigError(f"{name} must be at most {most}, not {shown(value)}")
