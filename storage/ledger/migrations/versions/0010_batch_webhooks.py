"""Webhooks of batches, and the answer tokens of jobs whose rows each say how many they may have."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("webhooks") as table:
        table.alter_column("job_id", existing_type=sa.String(64), nullable=True)
        table.add_column(sa.Column("batch_id", sa.String(64)))
        table.create_foreign_key("fk_webhooks_batch_id_batches", "batches", ["batch_id"], ["id"])
        table.create_index("ix_webhooks_batch_id", ["batch_id"])
    op.add_column("jobs", sa.Column("answer_tokens", sa.BigInteger))


def downgrade() -> None:
    with op.batch_alter_table("jobs") as table:
        table.drop_column("answer_tokens")
    op.execute("DELETE FROM webhooks WHERE job_id IS NULL")
    with op.batch_alter_table("webhooks") as table:
        table.drop_index("ix_webhooks_batch_id")
        table.drop_constraint("fk_webhooks_batch_id_batches", type_="foreignkey")
        table.drop_column("batch_id")
        table.alter_column("job_id", existing_type=sa.String(64), nullable=False)
