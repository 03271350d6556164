"""What decides which shard a worker takes next: priorities and tenants."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("priority", sa.Integer, nullable=False, server_default="0"))
    op.create_index("ix_jobs_turn", "jobs", ["state", "queue", "tenant", "priority", "created_at", "id"])
    op.drop_index("ix_shards_retry_at", "shards")
    op.create_index("ix_shards_state_retry_at", "shards", ["state", "retry_at"])
    op.create_index("ix_shards_job_id_state_number", "shards", ["job_id", "state", "number"])


def downgrade() -> None:
    op.drop_index("ix_shards_job_id_state_number", "shards")
    op.drop_index("ix_shards_state_retry_at", "shards")
    op.create_index("ix_shards_retry_at", "shards", ["retry_at"])
    op.drop_index("ix_jobs_turn", "jobs")
    with op.batch_alter_table("jobs") as table:
        table.drop_column("priority")
