"""Options that several commands share."""

import json
from typing import Annotated, Any, Literal

import typer

from ...engine.config import EngineConfig
from ...engine.errors import ConfigError
from ..workers.watchdog import DEFAULT_SECONDS

# What is longer no clock of ours counts.
_MOST_SECONDS = 366 * 86400

Model = Annotated[
    str,
    typer.Option(
        "--model", help="Model folder, GGUF file, or Hugging Face id: org/name, org/name@revision, org/name:Q4_K_M."
    ),
]
Revision = Annotated[
    str | None, typer.Option("--revision", help="Branch, tag or commit of a Hugging Face id; default: main.")
]
DType = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")]
Quantization = Annotated[
    str | None,
    typer.Option("--quantization", help="int8: weights and activations in 8 bits, on a CPU; default: neither."),
]
MaxNumSeqs = Annotated[int, typer.Option("--max-num-seqs", min=1, help="Most sequences in one step.")]
MaxNumBatchedTokens = Annotated[int, typer.Option("--max-num-batched-tokens", min=1, help="Most tokens in one step.")]
MaxModelLen = Annotated[
    int | None, typer.Option("--max-model-len", min=1, help="Longest prompt and answer; default: the model's context.")
]
EnablePrefixCaching = Annotated[
    bool, typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="Compute shared prefixes once.")
]
KvCacheDType = Annotated[
    str, typer.Option("--kv-cache-dtype", help="On a GPU: auto, fp8 (fp8_e4m3) or fp8_e5m2 keys and values.")
]
GpuMemoryUtilization = Annotated[
    float, typer.Option("--gpu-memory-utilization", help="Share of a GPU's memory that the worker may take.")
]
KvCacheMemoryBytes = Annotated[
    int | None,
    typer.Option(
        "--kv-cache-memory-bytes",
        min=1,
        metavar="N",
        help="Memory for keys and values; default: 2 GiB on a CPU, what is left of a GPU.",
    ),
]
MaxLoras = Annotated[int, typer.Option("--max-loras", min=1, help="Most LoRA adapters that a worker holds at a time.")]
MaxLoraRank = Annotated[int, typer.Option("--max-lora-rank", min=1, help="Highest rank of a LoRA adapter.")]
LoraModules = Annotated[
    list[str] | None,
    typer.Option(
        "--lora-modules",
        metavar="NAME=FOLDER",
        help="LoRA adapter that requests may name as their model; repeatable. Also as JSON, with base_model_name.",
    ),
]
ServedModelName = Annotated[
    str | None,
    typer.Option("--served-model-name", metavar="NAME", help="What requests call the model; default: its own name."),
]
GenerationConfig = Annotated[
    Literal["auto", "vllm"],
    typer.Option(
        "--generation-config",
        help="Where requests do not say how they are sampled: as the model's generation_config.json does, or as "
        "OpenAI's API does.",
    ),
]
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="On a GPU: launch each step without CUDA graphs.")]
SpeculativeConfigJson = Annotated[
    str | None,
    typer.Option(
        "--speculative-config",
        metavar="JSON",
        help="""Guess tokens from the text so far, '{"method": "ngram", "num_speculative_tokens": 4}', or by a """
        """second model of the same vocabulary, '{"method": "draft_model", "model": "FOLDER"}'; default: off.""",
    ),
]
TensorParallelSize = Annotated[
    int,
    typer.Option(
        "--tensor-parallel-size", "-tp", min=1, help="How many GPUs of this host share the model; on a CPU processes."
    ),
]

PipelineParallelSize = Annotated[
    int,
    typer.Option(
        "--pipeline-parallel-size",
        "-pp",
        min=1,
        help="Into how many stages of layers the model is split, each with as many GPUs as share its layers.",
    ),
]

DataParallelSize = Annotated[
    int,
    typer.Option(
        "--data-parallel-size",
        "-dp",
        min=1,
        help="How many workers of the model, each with GPUs of its own, or on a CPU with a share of the cores.",
    ),
]

WatchdogTimeout = Annotated[
    float,
    typer.Option(
        "--watchdog-timeout",
        metavar="SECONDS",
        help="End a worker whose engine hangs in a step for so long, for another to be started; 0: never. "
        "Loading, the first steps, a CPU that computes, and disks and stores have 12 times as long.",
    ),
]


def watchdog_seconds(watchdog_timeout: WatchdogTimeout = DEFAULT_SECONDS) -> float:
    """How long a worker's engine may hang. Raises `ConfigError`."""
    if watchdog_timeout != 0 and not 1 <= watchdog_timeout <= _MOST_SECONDS:
        raise ConfigError(
            f"--watchdog-timeout must be 0, which turns it off, or from 1 to {_MOST_SECONDS}, not {watchdog_timeout:g}"
        )
    return watchdog_timeout


def data_parallel_size(data_parallel_size: DataParallelSize = 1) -> int:
    """How many workers a command is to start for a model."""
    return data_parallel_size


def engine_config(
    max_num_seqs: MaxNumSeqs = 256,
    max_num_batched_tokens: MaxNumBatchedTokens = 2048,
    max_model_len: MaxModelLen = None,
    enable_prefix_caching: EnablePrefixCaching = True,
    enforce_eager: EnforceEager = False,
    gpu_memory_utilization: GpuMemoryUtilization = 0.9,
    kv_cache_memory_bytes: KvCacheMemoryBytes = None,
    max_loras: MaxLoras = 8,
    max_lora_rank: MaxLoraRank = 16,
    speculative_config: SpeculativeConfigJson = None,
    tensor_parallel_size: TensorParallelSize = 1,
    pipeline_parallel_size: PipelineParallelSize = 1,
) -> EngineConfig:
    """What a worker is told of its engine, its model's precision aside. Raises `ConfigError`."""
    return EngineConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_prefix_caching=enable_prefix_caching,
        enforce_eager=enforce_eager,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        speculative_config=parse_speculative_config(speculative_config),
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
    )


def engine_options(engine: EngineConfig) -> list[str]:
    """The same, as options of a worker of our own."""
    options = [
        f"--max-num-seqs={engine.max_num_seqs}",
        f"--max-num-batched-tokens={engine.max_num_batched_tokens}",
        "--enable-prefix-caching" if engine.enable_prefix_caching else "--no-enable-prefix-caching",
        f"--gpu-memory-utilization={engine.gpu_memory_utilization}",
        *(["--enforce-eager"] if engine.enforce_eager else []),
        f"--max-loras={engine.max_loras}",
        f"--max-lora-rank={engine.max_lora_rank}",
        *parallel_options(engine.tensor_parallel_size, engine.pipeline_parallel_size),
    ]
    if engine.max_model_len is not None:
        options.append(f"--max-model-len={engine.max_model_len}")
    if engine.speculative_config is not None:
        options.append(f"--speculative-config={json.dumps(engine.speculative_config)}")
    if engine.kv_cache_memory_bytes is not None:
        options.append(f"--kv-cache-memory-bytes={engine.kv_cache_memory_bytes}")
    return options


def worker_options(engine: EngineConfig, watchdog: float) -> list[str]:
    """With `watchdog_seconds`, the same."""
    return [*engine_options(engine), f"--watchdog-timeout={watchdog:g}"]


def parallel_options(tensor_parallel_size: int, pipeline_parallel_size: int) -> list[str]:
    """What makes a worker's processes more than one, as options."""
    sizes = {"--tensor-parallel-size": tensor_parallel_size, "--pipeline-parallel-size": pipeline_parallel_size}
    return [f"{name}={size}" for name, size in sizes.items() if size > 1]


def parse_speculative_config(text: str | None) -> Any:
    """What the option says, for `EngineConfig` to check. Raises `ConfigError` where it is no JSON."""
    if text is None:
        return None
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f'--speculative-config must be JSON like {{"method": "ngram"}}: {error}') from error
