"""`headrace run`: submit a file, start what is missing, show the way, say how it ended."""

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from ...engine.config import EngineConfig
from ...engine.hub import model_name
from ...storage.output_dir import OutputMode
from ...storage.records import JobState, Progress
from ..client import Client, Job, first_error
from ..errors import SpecError
from ..schemas import JobSpec
from .display import Pace, RunDisplay, counted, summary
from .inputs import opened_source, text_or_file
from .options import (
    DType,
    EnablePrefixCaching,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    Model,
    Quantization,
    Revision,
)


def run(
    model: Model,
    output: Annotated[Path, typer.Option("--output", help="Folder of the Parquet data set.")],
    input: Annotated[
        str | None,
        typer.Argument(
            metavar="[INPUT]",
            help="JSONL, CSV (both also .gz, .zst) or Parquet: a file, a folder of files or a URL; - reads a pipe.",
        ),
    ] = None,
    input_format: Annotated[
        str, typer.Option("--input-format", metavar="EXTENSION", help="What is piped in: jsonl, csv, jsonl.gz, ...")
    ] = "jsonl",
    sql: Annotated[str | None, typer.Option("--sql", metavar="URL", help="Read from this database instead.")] = None,
    query: Annotated[
        str | None, typer.Option("--query", metavar="SELECT|@FILE", help="With --sql: the rows to read.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option("--prompt", help="Template over the input's columns, such as '{text}'.")
    ] = None,
    system: Annotated[
        str | None, typer.Option("--system", metavar="TEXT|@FILE", help="System prompt, or @ and a file with it.")
    ] = None,
    choices: Annotated[
        str | None, typer.Option("--choices", metavar="a,b,c", help="Answer with one of these; gives label columns.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", help="Nucleus sampling, in (0, 1].")] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Draw from the k likeliest tokens; 0 is all.")] = 0,
    min_p: Annotated[float, typer.Option("--min-p", help="Least probability, as a share of the likeliest's.")] = 0.0,
    presence_penalty: Annotated[
        float, typer.Option("--presence-penalty", help="Against tokens the answer has, in [-2, 2].")
    ] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option("--frequency-penalty", help="The same, for each time it has them.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", help="Above 1: against tokens that prompt or answer have.")
    ] = 1.0,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", metavar="TEXT", help="End an answer before this text; repeatable.")
    ] = None,
    stop_token_ids: Annotated[
        str | None, typer.Option("--stop-token-ids", metavar="ID,ID", help="End an answer at one of these tokens.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the model's end token.")] = False,
    min_tokens: Annotated[int, typer.Option("--min-tokens", help="No end before this many tokens.")] = 0,
    logit_bias: Annotated[
        str | None,
        typer.Option("--logit-bias", metavar="ID:BIAS,...", help="Add to these tokens' logits, in [-100, 100]."),
    ] = None,
    n: Annotated[int, typer.Option("--n", help="Answers to each row, in the column 'outputs'.")] = 1,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Each token's log-probability, in the column 'logprobs'.")
    ] = False,
    top_logprobs: Annotated[
        int, typer.Option("--top-logprobs", help="With --logprobs: also the likeliest tokens', up to 20.")
    ] = 0,
    seed: Annotated[int, typer.Option("--seed", help="The same seed gives the same answers.")] = 0,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Only the first N rows.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Finish what an interrupted run left open.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output folder's data set.")] = False,
    revision: Revision = None,
    dtype: DType = "auto",
    quantization: Quantization = None,
    max_num_seqs: MaxNumSeqs = 256,
    max_num_batched_tokens: MaxNumBatchedTokens = 2048,
    max_model_len: MaxModelLen = None,
    enable_prefix_caching: EnablePrefixCaching = True,
) -> None:
    """Answer every row of INPUT and write a Parquet data set.

    Ctrl-C stops cleanly; the same command with --resume finishes the rest.
    """
    spec = JobSpec.parse(
        model=model_name(model, revision),
        dtype=dtype,
        quantization=quantization,
        system=None if system is None else text_or_file("--system", system),
        prompt=prompt,
        choices=_split_choices(choices),
        sampling={
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "repetition_penalty": repetition_penalty,
            "stop": stop or (),
            "stop_token_ids": _numbers(stop_token_ids),
            "ignore_eos": ignore_eos,
            "max_tokens": max_tokens,
            "min_tokens": min_tokens,
            "logit_bias": _biases(logit_bias),
            "n": n,
            "logprobs": logprobs,
            "top_logprobs": top_logprobs,
            "seed": seed,
        },
        limit=limit,
    )
    engine = EngineConfig(
        dtype=dtype,
        quantization=quantization,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        enable_prefix_caching=enable_prefix_caching,
    )
    mode = _mode(resume, overwrite)
    with _termination_as_interrupt(), Client() as client:
        job = None
        inputs = client.settings.data_dir / "inputs"
        try:
            with opened_source(input, input_format, sql, query, limit, inputs) as source:
                job = client.submit_spec(source, spec, output, mode)
            progress = _follow(client, job, _worker_options(engine))
        except KeyboardInterrupt:
            typer.echo(_farewell(job, mode), err=True)
            raise
    succeeded = progress.state is JobState.COMPLETED and progress.rows_failed < progress.rows_total
    raise typer.Exit(0 if succeeded else 1)


def _follow(client: Client, job: Job, worker_options: list[str]) -> Progress:
    """Until the job has ended, a worker of our own running if no other serves its queue."""
    progress = job.progress()
    pace = Pace(progress)
    typer.echo(_opening(job, progress), err=True)
    with client.local_worker(job, worker_options) as worker, RunDisplay(pace) as display:
        for progress in job.watch():
            display.show(progress)
            if progress.state is JobState.RUNNING:
                worker.tick(progress.rows_done)
                if pace.ready_at is None and client.is_served(job):
                    pace.worker_is_ready()
        pace.end()
    typer.echo(summary(pace, progress, job.record.output_dir))
    if progress.rows_failed:
        typer.echo(f"first error {first_error(client.ledger, job.record)}")
    return progress


def _farewell(job: Job | None, mode: OutputMode) -> str:
    """What an interrupted run has done, and the command that goes on from there."""
    if job is not None:
        done = job.progress()
        how_far, option = f"{done.rows_done} of {done.rows_total} rows are committed", "--resume"
    else:
        # The folder may already be taken for this job, or still be the one that was to be replaced.
        how_far, option = "no row has run yet", "--overwrite" if mode is OutputMode.OVERWRITE else "--resume"
    words = [word for word in sys.argv[1:] if word not in ("--resume", "--overwrite")]
    return f"\nstopped: {how_far}. To finish the rest:\n  {shlex.join(['headrace', *words, option])}"


def _opening(job: Job, progress: Progress) -> str:
    bad, tokens, shared = job.record.num_planned_errors, job.record.prompt_tokens, job.record.shared_tokens
    return (
        f"{job.id}: {counted(progress.rows_total, 'row')} in {counted(progress.shards_total, 'shard')}"
        + (f", {progress.rows_done} done before" if progress.rows_done else "")
        + (f", {shared / tokens:.0%} of {tokens:,} prompt tokens in shared prefixes" if tokens and shared else "")
        + (f", {bad} that cannot be asked (see the column 'error')" if bad else "")
    )


def _mode(resume: bool, overwrite: bool) -> OutputMode:
    if resume and overwrite:
        raise SpecError("--resume and --overwrite exclude each other: pass one")
    if resume:
        return OutputMode.RESUME
    return OutputMode.OVERWRITE if overwrite else OutputMode.NEW


def _split_choices(choices: str | None) -> tuple[str, ...] | None:
    if choices is None:
        return None
    return tuple(choice.strip() for choice in choices.split(","))


def _numbers(texts: str | None) -> list[str]:
    """The parts of a list; whether they are numbers is checked with the rest."""
    return texts.split(",") if texts else []


def _biases(text: str | None) -> dict[str, str]:
    pairs = [pair.partition(":") for pair in _numbers(text)]
    for token, colon, _ in pairs:
        if not colon:
            raise SpecError(f"--logit-bias must be a list of ID:BIAS, not {text!r} ({token!r} has no bias)")
    return {token.strip(): bias for token, _, bias in pairs}


def _worker_options(engine: EngineConfig) -> list[str]:
    options = [
        f"--max-num-seqs={engine.max_num_seqs}",
        f"--max-num-batched-tokens={engine.max_num_batched_tokens}",
        "--enable-prefix-caching" if engine.enable_prefix_caching else "--no-enable-prefix-caching",
    ]
    return options + ([f"--max-model-len={engine.max_model_len}"] if engine.max_model_len else [])


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """End on SIGTERM as on Ctrl-C: stop the worker, say how to resume."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
