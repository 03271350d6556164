"""The ledger's tables. A change needs a revision in `migrations/versions` and a new `SCHEMA_REVISION`."""

from enum import StrEnum

from sqlalchemy import JSON, BigInteger, Column, Double, Enum, ForeignKey, Index, Integer, MetaData, String, Table, Text
from sqlalchemy import UniqueConstraint as Unique

from .records import AttemptOutcome, JobState, ShardState, WebhookState

# Compared with the database before Alembic is imported: most processes find the schema as it should be.
SCHEMA_REVISION = "0015"

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


# One row, made with the database: what output folders know their ledger by.
identity = Table("identity", metadata, Column("ledger_id", String(32), primary_key=True))


def _state(states: type[StrEnum]) -> Enum:
    # Text in the database: a later state needs no migration.
    return Enum(states, native_enum=False, length=16, values_callable=lambda enum: [e.value for e in enum])


jobs = Table(
    "jobs",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("state", _state(JobState), nullable=False),
    Column("queue", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("output_dir", Text, nullable=False),
    Column("fingerprint", Text, nullable=False),
    Column("num_rows", Integer, nullable=False),
    Column("num_planned_errors", Integer, nullable=False),
    # What the planner found of prompts that begin alike; unknown of jobs recorded before it counted.
    Column("prompt_tokens", BigInteger),
    Column("shareable_tokens", BigInteger),
    Column("shared_tokens", BigInteger),
    # The most that all answers together may have, where each row says it for itself; of other jobs `spec` tells.
    Column("answer_tokens", BigInteger),
    Column("spec", JSON, nullable=False),
    Column("created_at", Double, nullable=False, index=True),
    Column("started_at", Double),
    Column("finished_at", Double),
    # After this rows without an answer expire.
    Column("deadline_at", Double),
    Column("idempotency_key", Text),
    Column("sink", JSON(none_as_null=True)),
    Column("error", Text),
    # Jobs of before there were tenants are the default one's.
    Column("tenant", String(64), nullable=False, server_default="default"),
    Index(None, "tenant", "idempotency_key", unique=True),
    # Higher first.
    Column("priority", Integer, nullable=False, server_default="0"),
    # Of the worker that took up its first shard; unknown of jobs from before that was noted.
    Column("weights", Text),
    # Those of later workers that had others, one a line.
    Column("other_weights", Text),
    # Of one that has completed and is not tidy yet: when the next may see to it, if nobody does.
    Column("tidy_at", Double, index=True),
    Index(None, "tenant", "created_at"),
    Index("ix_jobs_turn", "state", "queue", "tenant", "priority", "created_at", "id"),
)

shards = Table(
    "shards",
    metadata,
    Column("id", String(80), primary_key=True),
    Column("job_id", ForeignKey("jobs.id"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("state", _state(ShardState), nullable=False),
    Column("num_rows", Integer, nullable=False),
    Column("spool_path", Text, nullable=False),
    Column("num_attempts", Integer, nullable=False),
    # No foreign key: shards and attempts would refer to each other.
    Column("attempt_id", Integer, index=True),
    Column("lease_owner", Text),
    Column("lease_expires_at", Double),
    Column("enqueued_at", Double),
    # Of a queued shard that failed: not to be offered before.
    Column("retry_at", Double),
    # The number of the shard whose rows this one tries again where they failed; the spool is the same.
    Column("retry_of", Integer),
    Unique("job_id", "number"),
    Index(None, "state", "lease_expires_at"),
    Index(None, "state", "enqueued_at"),
    Index(None, "state", "retry_at"),
    Index(None, "job_id", "state", "number"),
)

attempts = Table(
    "attempts",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("shard_id", ForeignKey("shards.id"), nullable=False),
    Column("number", Integer, nullable=False),
    Column("owner", Text, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("ended_at", Double),
    Column("outcome", _state(AttemptOutcome)),
    Column("error", Text),
    # The rows that the engine has to itself, while rows are tried apart.
    Column("trial_rows", JSON(none_as_null=True)),
    Unique("shard_id", "number"),
)

parts = Table(
    "parts",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("job_id", ForeignKey("jobs.id"), nullable=False),
    Column("shard_id", ForeignKey("shards.id"), nullable=False, index=True),
    Column("attempt_id", ForeignKey("attempts.id"), nullable=False),
    Column("file_name", String(80), nullable=False),
    Column("num_rows", Integer, nullable=False),
    Column("num_failed", Integer, nullable=False),
    Column("prompt_tokens", Integer, nullable=False),
    Column("cached_tokens", Integer, nullable=False),
    Column("completion_tokens", Integer, nullable=False),
    Column("num_from_cache", Integer, nullable=False, server_default="0"),
    Column("num_truncated", Integer, nullable=False, server_default="0"),
    Column("committed_at", Double, nullable=False),
    Unique("job_id", "file_name"),
)

# A tenant without limits needs no row. A limit that is null is none.
tenants = Table(
    "tenants",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("requests_per_minute", Integer),
    Column("queued_tokens", BigInteger),
    Column("concurrent_jobs", Integer),
    Column("weight", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
)

# Of a key only what can not be turned back into it, and its first characters, by which people know it.
api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String(32), primary_key=True),
    Column("tenant", ForeignKey("tenants.name"), nullable=False),
    Column("name", Text),
    Column("prefix", String(16), nullable=False, index=True),
    Column("sha256", String(64), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("revoked_at", Double),
    Column("last_used_at", Double),
)

# Files of the OpenAI-compatible API; the bytes lie in the data folder under the id.
files = Table(
    "files",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("purpose", String(32), nullable=False),
    # What the client called it: never a path of ours.
    Column("filename", Text, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("sha256", String(64), nullable=False),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, index=True),
    Index(None, "tenant", "created_at"),
)

batches = Table(
    "batches",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("tenant", String(64), nullable=False),
    Column("state", String(16), nullable=False, index=True),
    Column("endpoint", String(64), nullable=False),
    # No foreign key: a file may be deleted while its batch goes on.
    Column("input_file_id", String(64), nullable=False),
    # The names by which the server that took it serves models; null of one from before this was kept.
    Column("served_models", JSON(none_as_null=True)),
    Column("completion_window", String(32), nullable=False),
    Column("metadata", JSON(none_as_null=True)),
    Column("output_expires_seconds", Integer),
    Column("job_id", String(64)),
    Column("model", Text),
    Column("errors", JSON(none_as_null=True)),
    Column("output_file_id", String(64)),
    Column("error_file_id", String(64)),
    # Why the batch is to end before its job does, once that is decided: `expired` or `cancelled`.
    Column("ending", String(16)),
    Column("created_at", Double, nullable=False),
    Column("expires_at", Double, nullable=False),
    Column("in_progress_at", Double),
    Column("finalizing_at", Double),
    Column("completed_at", Double),
    Column("failed_at", Double),
    Column("expired_at", Double),
    Column("cancelling_at", Double),
    Column("cancelled_at", Double),
    # Known once the batch has ended; until then its job's progress says.
    Column("num_total", Integer),
    Column("num_completed", Integer),
    Column("num_failed", Integer),
    Column("prompt_tokens", BigInteger),
    Column("cached_tokens", BigInteger),
    Column("completion_tokens", BigInteger),
    Column("reasoning_tokens", BigInteger),
    # Who validates or finalizes it at the moment.
    Column("lease_owner", String(64)),
    Column("lease_expires_at", Double),
    Index(None, "tenant", "created_at"),
)

webhooks = Table(
    "webhooks",
    metadata,
    Column("id", Integer, primary_key=True),
    # Whose end is to be told: one of the two.
    Column("job_id", ForeignKey("jobs.id"), index=True),
    Column("batch_id", ForeignKey("batches.id"), index=True),
    Column("url", Text, nullable=False),
    Column("secret", Text),
    Column("state", _state(WebhookState), nullable=False),
    # Of its last end, once it has ended.
    Column("event_id", String(64)),
    Column("event_type", String(64)),
    Column("event_at", Double),
    Column("num_attempts", Integer, nullable=False),
    # Also the end of the lease of whoever is at it.
    Column("next_attempt_at", Double),
    Column("error", Text),
    Index(None, "state", "next_attempt_at"),
)
