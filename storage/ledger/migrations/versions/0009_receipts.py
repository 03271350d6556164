"""What a job was answered with: the identity of its weights, and how many of its answers are earlier jobs'."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("weights", sa.Text))
    op.add_column("parts", sa.Column("num_from_cache", sa.Integer, nullable=False, server_default="0"))


def downgrade() -> None:
    with op.batch_alter_table("parts") as table:
        table.drop_column("num_from_cache")
    with op.batch_alter_table("jobs") as table:
        table.drop_column("weights")
