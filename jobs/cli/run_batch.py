"""`headrace run-batch`: a file of OpenAI's batch requests in, a file of their answers out, as vLLM has it."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from ...engine.checkpoints.hub import model_name
from ...engine.config import EngineConfig
from ...engine.paths import absolute_path
from ...storage.errors import Argument, StorageError
from ...storage.ledger.batch_records import BatchRecord, BatchState
from ...storage.readers.location import Location
from ..client.client import Client, Job
from ..client.display import counted
from ..errors import SpecError
from ..spec.lora import parse_loras
from ..spec.precision import Precision
from ..workers.placement import place
from .cost import GpuHourPrice
from .follow import accompany, at_first, conclude, exit_status, opening
from .interrupts import termination_as_interrupt
from .model_checks import check_model
from .options import (
    DType,
    GenerationConfig,
    KvCacheDType,
    LoraModules,
    Model,
    Quantization,
    Revision,
    ServedModelName,
    data_parallel_size,
    engine_config,
    watchdog_seconds,
    worker_options,
)
from .signatures import takes

if TYPE_CHECKING:
    from ..batches.offline import OfflineBatches

_OUTPUT = Argument("output_file")
_POLL_SECONDS = 0.1
_MAX_ERRORS = 20
_REFUSED, _FAILED = 2, 1


@dataclass(frozen=True)
class Requests:
    """A file of requests, and where their answers go."""

    input: Location
    output: Path


def requests(
    input_file: Annotated[
        str, typer.Option("--input-file", "-i", metavar="FILE", help="Requests in OpenAI's batch format; or a URL.")
    ],
    output_file: Annotated[
        str, typer.Option("--output-file", "-o", metavar="FILE", help="Their answers, one line each, in their order.")
    ],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output file.")] = False,
) -> Requests:
    """Raises `SpecError`."""
    output = absolute_path(output_file)
    if not output.parent.is_dir():
        raise SpecError(_OUTPUT, f" {output_file}: the folder {output.parent} does not exist")
    if output.is_dir() or not os.access(output.parent, os.W_OK):
        raise SpecError(_OUTPUT, f" {output_file} is no file that can be written")
    if output.exists() and not overwrite:
        raise SpecError(_OUTPUT, f" {output_file} exists: pass --overwrite to replace it, or name another file")
    source = Location(os.path.expanduser(input_file))
    if os.path.realpath(source.address.removeprefix("file://")) == os.path.realpath(output):
        raise SpecError(_OUTPUT, f" {output_file} is the input file: name another")
    return Requests(source, output)


@takes(requests, engine_config, watchdog_seconds, data_parallel_size)
def run_batch(
    requests: Requests,
    engine: EngineConfig,
    watchdog: float,
    num_workers: int,
    model: Model,
    served_model_name: ServedModelName = None,
    generation_config: GenerationConfig = "auto",
    revision: Revision = None,
    dtype: DType = "auto",
    quantization: Quantization = None,
    kv_cache_dtype: KvCacheDType = "auto",
    lora_modules: LoraModules = None,
    gpu_hour_price: GpuHourPrice = None,
) -> None:
    """Answer a file of requests in the format of OpenAI's Batch API, without a server.

    Ctrl-C stops cleanly; the same command finishes the rest, after a crash too.
    """
    # Here, not above: `--help` should not wait for them.
    from ..api.models import ServedModels
    from ..batches.files import FileStore
    from ..batches.keeper import BatchKeeper
    from ..batches.offline import OfflineBatches

    model = model_name(model, revision)
    check_model(model, engine)
    precision, loras = Precision(dtype, quantization, kv_cache_dtype), parse_loras(lora_modules or ())
    for lora in loras:
        lora.check(engine.max_lora_rank)
    places = place(num_workers, engine.world_size)
    models = ServedModels.of([model], precision, loras, served_model_name, generation_config)
    with termination_as_interrupt(), Client(places=places) as client:
        batches = OfflineBatches(client, models, FileStore.of(client.settings, client.ledger))
        job = None
        try:
            batch = batches.begin(requests.input, requests.output)
            is_new = batch.state is BatchState.VALIDATING
            with BatchKeeper.of(client, models):
                batch = _once(client, batch, lambda batch: batch.state is not BatchState.VALIDATING)
                if batch.job_id is None:
                    batches.forget_requests(batch)
                    _refuse(batch, requests.input)
                job = client.job(batch.job_id)
                first = at_first(job) if is_new else job.progress()
                typer.echo(opening(job, first), err=True)
                with job.local_workers(worker_options(engine, watchdog)) as workers:
                    pace, progress = accompany(client, job, first, lambda progress: workers.tick(progress.rows_done))
                batch = _once(client, batch, lambda batch: batch.state.has_ended)
            _deliver(batches, batch, requests.output)
        except KeyboardInterrupt:
            typer.echo(_farewell(job), err=True)
            raise
        conclude(client, job, pace, progress, str(requests.output), gpu_hour_price)
    raise typer.Exit(exit_status(progress))


def _deliver(batches: "OfflineBatches", batch: BatchRecord, output: Path) -> None:
    """Raises `typer.Exit` where the file cannot be written, as on a disk that has become full meanwhile."""
    try:
        batches.deliver(batch, output)
    except StorageError as error:
        typer.echo(f"headrace: {error}. The answers are kept, the same command writes them", err=True)
        raise typer.Exit(_FAILED) from error


def _once(client: Client, batch: BatchRecord, condition: Callable[[BatchRecord], bool]) -> BatchRecord:
    """The batch, as soon as it is so."""
    while not condition(batch):
        time.sleep(_POLL_SECONDS)
        batch = client.ledger.batches.get(batch.tenant, batch.id)
    return batch


def _refuse(batch: BatchRecord, input: Location) -> NoReturn:
    """Say what is wrong with the requests, none of which has been asked. Raises `typer.Exit`."""
    errors = batch.errors or [{"code": None, "line": None, "message": f"Batch {batch.id} was {batch.state}."}]
    # What is wrong with each of a million lines is said once.
    alike: dict[str, list[dict[str, Any]]] = {}
    for error in errors:
        alike.setdefault(error["message"], []).append(error)
    for message, (first, *others) in islice(alike.items(), _MAX_ERRORS):
        where = input.name if first["line"] is None else f"{input.name} line {first['line']}"
        more = f" (and {counted(len(others), 'other line')})" if others else ""
        hint = " Pass --served-model-name to answer to that name." if first["code"] == "model_not_found" else ""
        typer.echo(f"headrace: {where}{more}: {message}{hint}", err=True)
    if (hidden := len(alike) - _MAX_ERRORS) > 0:
        typer.echo(f"headrace: {counted(hidden, 'more error')}", err=True)
    raise typer.Exit(_REFUSED)


def _farewell(job: Job | None) -> str:
    if job is None:
        return "\nstopped: no request was asked yet"
    done = job.progress()
    return (
        f"\nstopped: {done.rows_done:,} of {done.rows_total:,} requests are answered and kept "
        f"(headrace cancel {job.id} drops the rest). The same command finishes the rest"
    )
