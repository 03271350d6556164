"""`headrace worker`: serve one model's queue until told to stop."""

import faulthandler
import logging
import os
import signal
from dataclasses import replace
from typing import Annotated

import typer

from ...engine.checkpoints.hub import locate_model, model_name
from ...engine.config import EngineConfig
from ..processes import die_with_parent
from ..settings import Settings
from ..spec.lora import parse_loras
from .imports import importing
from .model_checks import check_model
from .options import DType, KvCacheDType, LoraModules, Model, Quantization, Revision, engine_config, watchdog_seconds
from .signatures import takes


@takes(engine_config, watchdog_seconds)
def worker(
    engine: EngineConfig,
    watchdog: float,
    model: Model,
    revision: Revision = None,
    dtype: DType = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KvCacheDType = "auto",
    lora_modules: LoraModules = None,
    parent_pid: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Load a model and work on its jobs. SIGTERM or Ctrl-C hands back what is not finished and exits."""
    if parent_pid is not None:
        die_with_parent(parent_pid, signal.SIGTERM)
    # Of a worker that dies of a fault, or is ended as it runs no Python any more, the log says where its threads were.
    faulthandler.enable(2)
    _share_the_cores()
    settings = Settings.from_environment()
    logging.getLogger("headrace").setLevel(settings.log_level)
    # Here, not above: loading torch takes a second that no other command should wait for.
    with importing():
        from ..workers.worker import WorkerOptions, serve

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
    check_model(model_name(model, revision), engine)
    options = WorkerOptions(locate_model(model, revision), engine, settings.worker_concurrency, watchdog)
    raise typer.Exit(serve(settings, options))


def _share_the_cores() -> None:
    """Have torch's threads wait for each other by sleeping rather than spinning, before torch reads it.

    Next to one busy process the default spin made two threads slower than one (`docs/decisions.md`).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "3000")
