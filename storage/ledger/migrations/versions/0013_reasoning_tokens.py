"""How many of a batch's tokens were thinking."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("batches", sa.Column("reasoning_tokens", sa.BigInteger))


def downgrade() -> None:
    with op.batch_alter_table("batches") as table:
        table.drop_column("reasoning_tokens")
