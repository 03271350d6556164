"""Rows tried apart because of crashes, and when a shard that failed is tried again."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempts", sa.Column("trial_rows", sa.JSON))
    op.add_column("shards", sa.Column("retry_at", sa.Double))
    op.create_index("ix_shards_retry_at", "shards", ["retry_at"])


def downgrade() -> None:
    op.drop_index("ix_shards_retry_at", "shards")
    with op.batch_alter_table("shards") as table:
        table.drop_column("retry_at")
    with op.batch_alter_table("attempts") as table:
        table.drop_column("trial_rows")
