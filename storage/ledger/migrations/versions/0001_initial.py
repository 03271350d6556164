"""Jobs, shards, attempts, parts."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("queue", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("output_dir", sa.Text, nullable=False),
        sa.Column("fingerprint", sa.Text, nullable=False),
        sa.Column("num_rows", sa.Integer, nullable=False),
        sa.Column("num_planned_errors", sa.Integer, nullable=False),
        sa.Column("spec", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("started_at", sa.Double),
        sa.Column("finished_at", sa.Double),
        sa.Column("error", sa.Text),
        sa.PrimaryKeyConstraint("id", name="pk_jobs"),
    )
    op.create_index("ix_jobs_created_at", "jobs", ["created_at"])
    op.create_table(
        "shards",
        sa.Column("id", sa.String(80), nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("num_rows", sa.Integer, nullable=False),
        sa.Column("spool_path", sa.Text, nullable=False),
        sa.Column("num_attempts", sa.Integer, nullable=False),
        sa.Column("attempt_id", sa.Integer),
        sa.Column("lease_owner", sa.Text),
        sa.Column("lease_expires_at", sa.Double),
        sa.Column("enqueued_at", sa.Double),
        sa.PrimaryKeyConstraint("id", name="pk_shards"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_shards_job_id_jobs"),
        sa.UniqueConstraint("job_id", "number", name="uq_shards_job_id_number"),
    )
    op.create_index("ix_shards_attempt_id", "shards", ["attempt_id"])
    op.create_index("ix_shards_state_lease_expires_at", "shards", ["state", "lease_expires_at"])
    op.create_index("ix_shards_state_enqueued_at", "shards", ["state", "enqueued_at"])
    op.create_table(
        "attempts",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("shard_id", sa.String(80), nullable=False),
        sa.Column("number", sa.Integer, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("ended_at", sa.Double),
        sa.Column("outcome", sa.String(16)),
        sa.Column("error", sa.Text),
        sa.PrimaryKeyConstraint("id", name="pk_attempts"),
        sa.ForeignKeyConstraint(["shard_id"], ["shards.id"], name="fk_attempts_shard_id_shards"),
        sa.UniqueConstraint("shard_id", "number", name="uq_attempts_shard_id_number"),
    )
    op.create_table(
        "parts",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("shard_id", sa.String(80), nullable=False),
        sa.Column("attempt_id", sa.Integer, nullable=False),
        sa.Column("file_name", sa.String(80), nullable=False),
        sa.Column("num_rows", sa.Integer, nullable=False),
        sa.Column("num_failed", sa.Integer, nullable=False),
        sa.Column("prompt_tokens", sa.Integer, nullable=False),
        sa.Column("cached_tokens", sa.Integer, nullable=False),
        sa.Column("completion_tokens", sa.Integer, nullable=False),
        sa.Column("committed_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_parts"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_parts_job_id_jobs"),
        sa.ForeignKeyConstraint(["shard_id"], ["shards.id"], name="fk_parts_shard_id_shards"),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name="fk_parts_attempt_id_attempts"),
        sa.UniqueConstraint("job_id", "file_name", name="uq_parts_job_id_file_name"),
    )
    op.create_index("ix_parts_shard_id", "parts", ["shard_id"])


def downgrade() -> None:
    for table in ("parts", "attempts", "shards", "jobs"):
        op.drop_table(table)
