"""The ledger's tables. A change needs a revision in `migrations/versions` and a new `SCHEMA_REVISION`."""

from enum import StrEnum

from sqlalchemy import JSON, BigInteger, Column, Double, Enum, ForeignKey, Index, Integer, MetaData, String, Table, Text
from sqlalchemy import UniqueConstraint as Unique

from .records import AttemptOutcome, JobState, ShardState

# Compared with the database before Alembic is imported: most processes find the schema as it should be.
SCHEMA_REVISION = "0008"

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


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
    Column("spec", JSON, nullable=False),
    Column("created_at", Double, nullable=False, index=True),
    Column("started_at", Double),
    Column("finished_at", Double),
    # After this no worker begins a row.
    Column("deadline_at", Double),
    Column("idempotency_key", Text),
    Column("sink", JSON(none_as_null=True)),
    Column("error", Text),
    Index(None, "idempotency_key", unique=True),
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
    Column("retry_at", Double, index=True),
    # The number of the shard whose rows this one tries again where they failed; the spool is the same.
    Column("retry_of", Integer),
    Unique("job_id", "number"),
    Index(None, "state", "lease_expires_at"),
    Index(None, "state", "enqueued_at"),
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
    Column("committed_at", Double, nullable=False),
    Unique("job_id", "file_name"),
)
