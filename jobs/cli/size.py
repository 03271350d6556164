"""`headrace size`: what a model takes of GPUs' memory, by its description alone."""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated

import typer

from ...engine.checkpoints.hub import locate_model, public_name
from ...engine.config import EngineConfig
from ..planning.model_fit import GIB, GPU_GIB, Fit, Gpu, ModelNeeds
from .keys import AsJson
from .options import (
    DType,
    EnforceEager,
    GpuMemoryUtilization,
    KvCacheDType,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    PipelineParallelSize,
    Revision,
    SpeculativeConfigJson,
    TensorParallelSize,
    parse_speculative_config,
)
from .tables import print_table

_TOO_SMALL = (
    "Where one sequence takes several GPUs, so many have the memory together: --tensor-parallel-size says what each of "
    "those takes that share the model. It must divide the model's attention heads. --pipeline-parallel-size gives each "
    "some of the layers instead."
)


def size(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder with a config.json, GGUF file, or Hugging Face id.")
    ],
    gpu: Annotated[
        list[str] | None,
        typer.Option("--gpu", metavar="GPU", help=f"{', '.join(GPU_GIB)}, or memory such as 24GiB; repeatable."),
    ] = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 256,
    max_num_batched_tokens: MaxNumBatchedTokens = 2048,
    dtype: DType = "auto",
    kv_cache_dtype: KvCacheDType = "auto",
    gpu_memory_utilization: GpuMemoryUtilization = 0.9,
    enforce_eager: EnforceEager = False,
    speculative_config: SpeculativeConfigJson = None,
    tensor_parallel_size: TensorParallelSize = 1,
    pipeline_parallel_size: PipelineParallelSize = 1,
    revision: Revision = None,
    as_json: AsJson = False,
) -> None:
    """Say what MODEL takes of GPUs' memory.

    Weights, KV cache, and how many tokens and sequences fit beside them.
    Reads config.json, or a GGUF file's metadata, alone. What the largest step takes is an estimate: a worker measures
    it when it starts.
    """
    options = EngineConfig(
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        gpu_memory_utilization=gpu_memory_utilization,
        enforce_eager=enforce_eager,
        speculative_config=parse_speculative_config(speculative_config),
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
    )
    gpus = [Gpu.of(each) for each in gpu or GPU_GIB]
    located = locate_model(model, revision, with_weights=False)
    needs = ModelNeeds.of(located.folder, options)
    fits = [Fit(each, needs) for each in gpus]
    if as_json:
        found = {"model": located.name, **asdict(needs), "gpus": [_as_json(fit, max_num_seqs) for fit in fits]}
        typer.echo(json.dumps(found))
    else:
        _print(public_name(located.name), needs, fits, max_num_seqs)


def _as_json(fit: Fit, num_seqs: int) -> dict[str, object]:
    return {
        **asdict(fit.gpu),
        "kv_bytes": fit.kv_bytes,
        "kv_tokens": fit.kv_tokens,
        "num_sequences": fit.num_sequences,
        "num_gpus_for_one_sequence": fit.num_gpus(1),
        "num_gpus_for_max_num_seqs": fit.num_gpus(num_seqs),
    }


def _print(name: str, needs: ModelNeeds, fits: list[Fit], num_seqs: int) -> None:
    longest = f"{needs.sequence_tokens:,} tokens"
    whose = "" if needs.num_sharing == 1 else f", of each of {needs.num_sharing} GPUs"
    # Stages are not all alike.
    most = " at most" if needs.pipeline_parallel_size > 1 else ""
    lines = [
        ("model", f"{name}, {needs.parameters:,} parameters in {needs.dtype}"),
        ("weights", _memory(needs.weight_bytes) + whose + most + _of_guesser(_memory, needs.guessing.weight_bytes)),
        (
            "KV cache",
            f"{needs.kv_token_bytes:,} bytes a token in {needs.kv_dtype}"
            + _of_guesser("{:,}".format, needs.guessing.kv_token_bytes),
        ),
        ("a sequence", f"{_memory(needs.sequence_bytes)} of KV for {longest}" + _of_states(needs.state_bytes)),
        ("beside them", f"about {_memory(needs.beside_bytes)}: the largest step, CUDA graphs, the driver"),
    ]
    for title, text in lines:
        typer.echo(f"{title:<13}{text}")
    typer.echo()
    heading = ("GPU", "MEMORY", "LEFT FOR KV", "TOKENS", "SEQUENCES", "GPUS FOR ONE", f"GPUS FOR {num_seqs:,}")
    print_table(heading, [_line(fit, num_seqs) for fit in fits])
    if not all(fit.num_sequences for fit in fits):
        typer.echo(f"\n{_TOO_SMALL}")


def _of_states(num_bytes: int) -> str:
    return f", {_memory(num_bytes)} of it a state of any length" if num_bytes else ""


def _of_guesser(shown: Callable[[int], str], num_bytes: int) -> str:
    return f", {shown(num_bytes)} of them to guess with" if num_bytes else ""


def _line(fit: Fit, num_seqs: int) -> tuple[str, ...]:
    gpus = (fit.num_gpus(count) for count in (1, num_seqs))
    room = _memory(fit.kv_bytes) if fit.num_blocks else "does not fit"
    counts = (f"{fit.kv_tokens:,}", f"{fit.num_sequences:,}", *("-" if each is None else f"{each:,}" for each in gpus))
    return (fit.gpu.name, _memory(fit.gpu.memory_bytes), room, *counts)


def _memory(num_bytes: int) -> str:
    units = {"GiB": GIB, "MiB": 2**20, "KiB": 2**10}
    # No less than a tenth of it.
    unit = next((unit for unit, size in units.items() if num_bytes >= size // 10), "KiB")
    return f"{num_bytes / units[unit]:.1f} {unit}"
