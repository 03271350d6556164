"""What `headrace run` says at its end."""

from ...storage.ledger.records import Progress
from ..client.display import Pace, counted, rate_of
from .cost import cost


def summary(pace: Pace, progress: Progress, output: str, gpu_hour_price: float | None = None) -> str:
    """The last lines of a run, for standard output. Of a job that had ended before that nothing was timed."""
    return "\n".join(
        [
            f"job         {progress.job_id} {progress.state}",
            f"rows        {progress.rows_done:,} of {progress.rows_total:,}: {_origins(pace.first, progress)}, "
            f"{progress.rows_failed:,} failed",
            *([f"truncated   {_truncated(progress)}"] if progress.rows_truncated else []),
            *([] if pace.first.state.has_ended else _speeds(pace, progress)),
            *([f"cost        {_cost(gpu_hour_price, pace, progress)}"] if gpu_hour_price is not None else []),
            f"output      {output}",
        ]
    )


def _speeds(pace: Pace, progress: Progress) -> list[str]:
    return [
        f"time        {pace.seconds:.1f} s, of which {pace.working_seconds:.1f} s with the model loaded",
        f"rate        {rate_of(pace.rows_per_second(progress), decimals=1)} rows/s, "
        f"{pace.tokens_per_second(progress):,.0f} tokens/s (prompt and completion)",
        f"hit rate    {pace.hit_rate(progress):.1%} of prompt tokens from the prefix cache",
    ]


def _cost(price: float, pace: Pace, now: Progress) -> str:
    """Of what this run has done, from the moment a worker was ready."""
    first = pace.first
    prompt, completion = now.prompt_tokens - first.prompt_tokens, now.completion_tokens - first.completion_tokens
    return cost(price, pace.working_seconds, prompt, completion)


def _truncated(progress: Progress) -> str:
    answers = counted(progress.rows_truncated, "answer")
    return f"{answers} ended at max_tokens, or with the context (finish_reason 'length')"


def _origins(first: Progress, now: Progress) -> str:
    """Where the answers of a run come from; rows that failed are none of them."""
    kept = first.rows_done - first.rows_failed
    from_cache = now.rows_from_cache - first.rows_from_cache
    generated = now.rows_done - now.rows_failed - kept - from_cache
    cached = f"{from_cache:,} from the result cache, " if from_cache else ""
    return f"{generated:,} generated, {cached}{kept:,} kept from before"
