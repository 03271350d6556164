"""Which other weights a job's later workers had."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("jobs", sa.Column("other_weights", sa.Text))


def downgrade() -> None:
    with op.batch_alter_table("jobs") as table:
        table.drop_column("other_weights")
