"""Deadlines, idempotency keys, sinks, and shards that try another shard's failed rows again."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("deadline_at", sa.Double))
    op.add_column("jobs", sa.Column("idempotency_key", sa.Text))
    op.add_column("jobs", sa.Column("sink", sa.JSON(none_as_null=True)))
    op.create_index("ix_jobs_idempotency_key", "jobs", ["idempotency_key"], unique=True)
    op.add_column("shards", sa.Column("retry_of", sa.Integer))


def downgrade() -> None:
    with op.batch_alter_table("shards") as table:
        table.drop_column("retry_of")
    op.drop_index("ix_jobs_idempotency_key", "jobs")
    with op.batch_alter_table("jobs") as table:
        table.drop_column("sink")
        table.drop_column("idempotency_key")
        table.drop_column("deadline_at")
