"""Webhooks and what is still to be delivered to them."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "webhooks",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("job_id", sa.String(64), nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("secret", sa.Text),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("event_id", sa.String(64)),
        sa.Column("event_type", sa.String(64)),
        sa.Column("event_at", sa.Double),
        sa.Column("num_attempts", sa.Integer, nullable=False),
        sa.Column("next_attempt_at", sa.Double),
        sa.Column("error", sa.Text),
        sa.PrimaryKeyConstraint("id", name="pk_webhooks"),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name="fk_webhooks_job_id_jobs"),
    )
    op.create_index("ix_webhooks_job_id", "webhooks", ["job_id"])
    op.create_index("ix_webhooks_state_next_attempt_at", "webhooks", ["state", "next_attempt_at"])


def downgrade() -> None:
    op.drop_table("webhooks")
