"""`headrace worker`: serve one model's queue until told to stop."""

import faulthandler
import logging
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Event
from typing import Annotated

import typer

from ...engine.checkpoints.hub import locate_model, model_name
from ...engine.config import EngineConfig
from ..processes import die_with_parent
from ..settings import Settings
from ..spec.lora import parse_loras
from ..spec.lora import worker_options as lora_options
from ..spec.precision import Precision
from ..workers.kept_workers import KeptWorkers, names_of_workers
from ..workers.placement import place
from ..workers.worker_process import REFUSED
from .imports import importing
from .interrupts import termination_as_interrupt
from .model_checks import check_model
from .named_lines import print_named
from .options import (
    DType,
    KvCacheDType,
    LoraModules,
    Model,
    Quantization,
    Revision,
    data_parallel_size,
    engine_config,
    watchdog_seconds,
    worker_options,
)
from .signatures import takes

# What each of several is called, in the log of all.
_NAME = "worker"
_LOOK_SECONDS = 1.0


@takes(engine_config, watchdog_seconds, data_parallel_size)
def worker(
    engine: EngineConfig,
    watchdog: float,
    num_workers: int,
    model: Model,
    revision: Revision = None,
    dtype: DType = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KvCacheDType = "auto",
    lora_modules: LoraModules = None,
    parent_pid: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Load a model and work on its jobs. SIGTERM or Ctrl-C hands back what is not finished and exits.

    With --data-parallel-size there are several such processes, each started again should it die.
    """
    if parent_pid is not None:
        die_with_parent(parent_pid, signal.SIGTERM)
    # Of a worker that dies of a fault, or is ended as it runs no Python any more, the log says where its threads were.
    faulthandler.enable(2)
    _share_the_cores()
    settings = Settings.from_environment()
    logging.getLogger("headrace").setLevel(settings.log_level)
    loras = parse_loras(lora_modules or ())
    for lora in loras:
        lora.check(engine.max_lora_rank)
    engine = replace(
        engine,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        # Those of requests and jobs that name others are loaded when they come.
        enable_lora=True,
        lora_modules=[lora.request(number) for number, lora in enumerate(loras, 1)],
    )
    # Before the weights are fetched, where that is to be done.
    check_model(name := model_name(model, revision), engine)
    if num_workers > 1:
        places = place(num_workers, engine.world_size)
        precision = Precision(dtype, quantization, kv_cache_dtype)
        command = ["--model", name, *precision.worker_options, *lora_options(loras), *worker_options(engine, watchdog)]
        raise typer.Exit(_keep(command, places))
    # Here, not above: loading torch takes a second that no other command should wait for.
    with importing():
        from ..workers.worker import WorkerOptions, serve

    options = WorkerOptions(locate_model(model, revision), engine, settings.worker_concurrency, watchdog)
    raise typer.Exit(serve(settings, options))


def _keep(options: Sequence[str], places: Sequence[Mapping[str, str]]) -> int:
    """Have several workers until told to stop; returns the exit status."""
    reasons: list[str] = []
    has_ended = Event()

    def give_up(reason: str) -> None:
        reasons.append(reason)
        has_ended.set()

    width = max(map(len, names_of_workers(_NAME, len(places))))
    workers = KeptWorkers(_NAME, options, places, partial(print_named, width), give_up)
    with termination_as_interrupt(), suppress(KeyboardInterrupt):
        try:
            workers.start()
            # A signal that comes just before it waits, or that another thread is given, does not wake it.
            while not has_ended.wait(_LOOK_SECONDS):
                pass
        finally:
            KeptWorkers.stop([workers])
    for reason in reasons:
        typer.echo(f"headrace: {reason}", err=True)
    return REFUSED if reasons else 0


def _share_the_cores() -> None:
    """Have torch's threads wait for each other by sleeping rather than spinning, before torch reads it.

    Next to one busy process the default spin made two threads slower than one (`docs/decisions.md`).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
