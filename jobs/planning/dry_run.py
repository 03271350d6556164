"""What a job would be, found out by planning it: nothing is queued and nothing is kept."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ...engine.checkpoints.model_config import ModelConfig
from ...engine.checkpoints.model_size import kv_token_bytes
from ...engine.config import DEFAULT_KV_CACHE_BYTES, EngineConfig
from ...engine.sharding.stages import stage_shares
from ...engine.text.tokenizer import Tokenizer
from ...storage.readers import InputSource
from ...storage.rows.spool import PlannedRow
from ..broker.celery_app import shard_queue
from ..spec.schemas import JobSpec
from .planner import make_planner
from .shard_cutter import PrefixSharing

_ERRORS_SHOWN = 5


@dataclass
class Forecast:
    """The rows of a job as planned; tokens are prompt tokens.

    `context_tokens` is what a prompt and its answer may have, `kv_tokens` what a worker's KV memory holds with `dtype`,
    `num_processes` sharing the model, `answer_tokens` what an answer may come to. `queue`: that of the workers which
    would run it. `errors` are those of the first rows at fault, in the input's order.
    """

    num_rows: int
    num_errors: int
    context_tokens: int
    kv_tokens: int
    answer_tokens: int
    dtype: str
    queue: str
    num_shards: int = 0
    largest_prompt: int = 0
    sharing: PrefixSharing = field(default_factory=PrefixSharing)
    num_processes: int = 1
    is_kv_default: bool = True
    errors: list[tuple[int, str]] = field(default_factory=list)


def forecast(
    source: InputSource,
    spec: JobSpec,
    shard_rows: int | None,
    sort_folder: Path,
    engine: EngineConfig,
    num_workers: int = 1,
) -> Forecast:
    """Plan a job without submitting it; nothing is left in `sort_folder`.

    `engine`: that of a worker which would run it; `num_workers`: how many would share it. Raises what `Producer.submit`
    does, or `ConfigError` where the model cannot be shared so.
    """
    planner = make_planner(spec, shard_rows, sort_folder)
    dtype = planner.model.checkpoint_dtype if spec.dtype == "auto" else spec.dtype
    kv_tokens = _kv_tokens(planner.model, dtype, engine)
    context = planner.model.max_position_embeddings
    with planner.plan(source, num_workers=num_workers) as plan:
        found = Forecast(
            plan.num_rows,
            plan.num_errors,
            min(context, engine.max_model_len or context),
            kv_tokens,
            _answer_tokens(planner.spec, planner.tokenizer),
            dtype,
            shard_queue(planner.spec.model, planner.spec.precision),
            sharing=plan.sharing,
            num_processes=engine.world_size,
            is_kv_default=engine.kv_cache_memory_bytes is None,
        )
        _observe(found, plan.shards())
    return found


def _observe(found: Forecast, shards: Iterator[list[PlannedRow]]) -> None:
    for shard in shards:
        found.num_shards += 1
        for row in shard:
            found.largest_prompt = max(found.largest_prompt, len(row.prompt_token_ids or ()))
        faults = ((row.row, row.error) for row in shard if row.error is not None)
        found.errors = sorted((*found.errors, *faults))[:_ERRORS_SHOWN]


def _answer_tokens(spec: JobSpec, tokenizer: Tokenizer) -> int:
    """A choice may be longer than `max_tokens`: it is never cut. What is thought before it they bound."""
    sampling = spec.sampling
    if spec.choices is None:
        return sampling.max_tokens
    longest = max(map(len, tokenizer.encode_choices(spec.choices)))
    if (thinking := tokenizer.reasoning(sampling.reasoning)) is None:
        return longest
    budget = sampling.thinking_token_budget
    thought = sampling.max_tokens if budget is None else min(sampling.max_tokens, budget)
    # With its markers.
    markers = len(thinking.opening) + len(thinking.closing) + len(thinking.break_token_ids)
    return thought + markers + longest


def _kv_tokens(model: ModelConfig, dtype: str, engine: EngineConfig) -> int:
    """Of the process that has the most to keep of a token: each has as many bytes."""
    item_bytes = 4 if dtype == "float32" else 2
    shares = stage_shares(model, engine.tensor_parallel_size, engine.pipeline_parallel_size)
    most = max(kv_token_bytes(share, item_bytes) for share in shares)
    return (engine.kv_cache_memory_bytes or DEFAULT_KV_CACHE_BYTES) // most
