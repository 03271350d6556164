"""`headrace verify`: rows of a data set, made again and compared."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from ...engine.checkpoints.hub import model_name
from ...engine.config import EngineConfig
from ..client.client import Client
from ..client.display import counted
from ..errors import SpecError
from ..verification import verifying
from ..verification.receipts import Receipt
from ..verification.sample import Sample
from ..verification.verifying import Verification
from .interrupts import termination_as_interrupt
from .keys import AsJson
from .model_checks import check_model
from .options import engine_config, watchdog_seconds, worker_options
from .signatures import takes
from .tables import print_table

_DEFAULT_ROWS = 100
_SHOWN = 20


@takes(engine_config, watchdog_seconds)
def verify(
    engine: EngineConfig,
    watchdog: float,
    name: Annotated[
        str, typer.Argument(metavar="OUTPUT|JOB|BATCH", help="A data set's folder, or a job's or batch's id.")
    ],
    rows: Annotated[
        int | None, typer.Option("--rows", min=1, help=f"How many rows to make again; default: {_DEFAULT_ROWS}.")
    ] = None,
    fraction: Annotated[float | None, typer.Option("--fraction", help="Or which share of them, in (0, 1].")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Another seed draws other rows.")] = 0,
    tolerance: Annotated[float, typer.Option("--tolerance", help="By how much probabilities may differ.")] = 0.01,
    model: Annotated[
        str | None, typer.Option("--model", help="Where the model is by now, if it is not where the job had it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make some rows of a job again and compare them.

    With its model, parameters and seeds, and with what is stored. The exit status is 0 when all are
    equal, 1 when some differ, or rows that were done are not there any more.
    """
    size = _size(rows, fraction)
    if not tolerance >= 0:
        raise SpecError(f"--tolerance must be ≥ 0, not {tolerance}")
    with termination_as_interrupt(), Client() as client:
        receipt = Receipt.find(client.ledger, name)
        sample = Sample.draw(receipt.rows(), size, seed)
        at = None if model is None else model_name(model)
        check_model(at or receipt.spec.model, engine)
        done = verifying.verify(client, receipt, sample, at, tolerance, worker_options(engine, watchdog))
    if as_json:
        typer.echo(json.dumps(_as_json(done, seed), ensure_ascii=False, default=str))
    else:
        _print(done)
    raise typer.Exit(1 if done.differences or done.num_missing else 0)


def _size(rows: int | None, fraction: float | None) -> int | float:
    if rows is not None and fraction is not None:
        raise SpecError("--rows and --fraction exclude each other: pass one")
    if fraction is not None and not 0 < fraction <= 1:
        raise SpecError(f"--fraction must be in (0, 1], not {fraction}")
    return fraction if fraction is not None else rows or _DEFAULT_ROWS


def _counts(done: Verification) -> dict[str, dict[str, int]]:
    """By the kinds of rows: how many there are, were made again, came out equal."""
    sample = done.sample
    differing = {difference.row for difference in done.differences}
    kinds = Counter[tuple[str, bool]]()
    for row, is_cached in zip(sample.table["row"].to_pylist(), _is_cached(sample), strict=True):
        kinds["from_cache" if is_cached else "generated", row not in differing] += 1
    totals = {"generated": sample.num_generated, "from_cache": sample.num_from_cache}
    counts = {
        kind: {
            "rows": total,
            "verified": kinds[kind, True] + kinds[kind, False],
            "equal": kinds[kind, True],
            "different": kinds[kind, False],
        }
        for kind, total in totals.items()
    }
    return counts | {"errors": {"rows": sample.num_errors, "verified": 0, "equal": 0, "different": 0}}


def _is_cached(sample: Sample) -> list[bool]:
    if "from_cache" not in sample.table.column_names:
        return [False] * len(sample.table)
    return [bool(value) for value in sample.table["from_cache"].to_pylist()]


def _print(done: Verification) -> None:
    typer.echo(f"job       {done.receipt.job_id}")
    typer.echo(f"output    {done.receipt.folder}")
    typer.echo(f"weights   {_weights(done)}")
    for change in done.changes:
        typer.echo(f"changed   {change}")
    typer.echo()
    counts = _counts(done)
    lines = [(kind.replace("_", " "), *(f"{each:,}" for each in count.values())) for kind, count in counts.items()]
    print_table(("ROWS", "IN ALL", "MADE AGAIN", "EQUAL", "DIFFERENT"), lines)
    typer.echo()
    for line in _summary(done):
        typer.echo(line)


def _weights(done: Verification) -> str:
    before, now = done.receipt.weights, done.weights
    if done.same_weights is None:
        return f"{now}; those of the job were not noted"
    return f"{now}, those of the job" if done.same_weights else f"{now} ARE NOT THOSE OF THE JOB: {before}"


def _summary(done: Verification) -> Iterator[str]:
    total, num_different = len(done.sample.table), len(done.differences)
    for difference in done.differences[:_SHOWN]:
        yield str(difference)
    if num_different > _SHOWN:
        yield f"… and {counted(num_different - _SHOWN, 'more row')}"
    if num_different:
        yield f"{num_different:,} of {counted(total, 'row')} made again differ"
    else:
        yield f"{counted(total, 'row')} made again: all equal"
    if done.num_missing:
        yield f"{done.num_missing:,} of {counted(done.receipt.num_rows or 0, 'row')} are gone: their files were removed"


def _as_json(done: Verification, seed: int) -> dict[str, Any]:
    return {
        "job": done.receipt.job_id,
        "output": str(done.receipt.folder),
        "seed": seed,
        "weights": {"job": done.receipt.weights, "now": done.weights, "same": done.same_weights},
        "rows": _counts(done),
        "missing_rows": done.num_missing,
        "changes": [vars(change) for change in done.changes],
        "differences": [vars(difference) for difference in done.differences],
    }
