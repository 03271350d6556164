"""What is left to do for completed jobs, and what tells this ledger from others."""

import uuid

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("tidy_at", sa.Double))
    op.create_index("ix_jobs_tidy_at", "jobs", ["tidy_at"])
    identity = op.create_table(
        "identity",
        sa.Column("ledger_id", sa.String(32), nullable=False),
        sa.PrimaryKeyConstraint("ledger_id", name="pk_identity"),
    )
    op.bulk_insert(identity, [{"ledger_id": uuid.uuid4().hex}])


def downgrade() -> None:
    op.drop_table("identity")
    with op.batch_alter_table("jobs") as table:
        table.drop_index("ix_jobs_tidy_at")
        table.drop_column("tidy_at")
