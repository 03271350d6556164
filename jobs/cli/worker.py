"""`headrace worker`: serve one model's queue until told to stop."""

import logging
import os
import signal
from typing import Annotated

import typer

from ...engine.checkpoints.hub import locate_model
from ...engine.checkpoints.model_config import ModelConfig
from ...engine.text.guessers import check_guessing
from ..imports import importing
from ..lora import parse_loras
from ..processes import die_with_parent
from ..settings import Settings
from .options import (
    DType,
    EnablePrefixCaching,
    EnforceEager,
    GpuMemoryUtilization,
    KvCacheDType,
    KvCacheMemoryBytes,
    LoraModules,
    MaxLoraRank,
    MaxLoras,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    Model,
    PipelineParallelSize,
    Quantization,
    Revision,
    SpeculativeConfigJson,
    TensorParallelSize,
    parse_speculative_config,
)


def worker(
    model: Model,
    revision: Revision = None,
    dtype: DType = "auto",
    quantization: Quantization = None,
    max_num_seqs: MaxNumSeqs = 256,
    max_num_batched_tokens: MaxNumBatchedTokens = 2048,
    max_model_len: MaxModelLen = None,
    enable_prefix_caching: EnablePrefixCaching = True,
    enforce_eager: EnforceEager = False,
    kv_cache_dtype: KvCacheDType = "auto",
    gpu_memory_utilization: GpuMemoryUtilization = 0.9,
    kv_cache_memory_bytes: KvCacheMemoryBytes = None,
    lora_modules: LoraModules = None,
    max_loras: MaxLoras = 8,
    max_lora_rank: MaxLoraRank = 16,
    speculative_config: SpeculativeConfigJson = None,
    tensor_parallel_size: TensorParallelSize = 1,
    pipeline_parallel_size: PipelineParallelSize = 1,
    parent_pid: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Load a model and work on its jobs. SIGTERM or Ctrl-C hands back what is not finished and exits."""
    if parent_pid is not None:
        die_with_parent(parent_pid, signal.SIGTERM)
    _share_the_cores()
    settings = Settings.from_environment()
    logging.getLogger("headrace").setLevel(settings.log_level)
    # Here, not above: loading torch takes a second that no other command should wait for.
    with importing():
        from ...engine.config import EngineConfig
        from ..worker import WorkerOptions, serve

    loras = parse_loras(lora_modules or ())
    for lora in loras:
        lora.check(max_lora_rank)
    engine = EngineConfig(
        dtype=dtype,
        quantization=quantization,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_prefix_caching=enable_prefix_caching,
        enforce_eager=enforce_eager,
        kv_cache_dtype=kv_cache_dtype,
        gpu_memory_utilization=gpu_memory_utilization,
        kv_cache_memory_bytes=kv_cache_memory_bytes,
        # Those of requests and jobs that name others are loaded when they come.
        enable_lora=tensor_parallel_size == pipeline_parallel_size == 1,
        max_loras=max_loras,
        max_lora_rank=max_lora_rank,
        lora_modules=[lora.request(number) for number, lora in enumerate(loras, 1)],
        speculative_config=parse_speculative_config(speculative_config),
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
    )
    located = locate_model(model, revision)
    if engine.speculative is not None:
        check_guessing(engine.speculative, ModelConfig.from_pretrained(located.folder))
    raise typer.Exit(serve(settings, WorkerOptions(located, engine, settings.worker_concurrency)))


def _share_the_cores() -> None:
    """Have torch's threads wait for each other by sleeping rather than spinning, before torch reads it.

    Next to one busy process the default spin made two threads slower than one (`docs/decisions.md`).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
