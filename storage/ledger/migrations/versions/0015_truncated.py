"""How many of a part's answers were cut off."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("parts", sa.Column("num_truncated", sa.Integer, nullable=False, server_default="0"))


def downgrade() -> None:
    with op.batch_alter_table("parts") as table:
        table.drop_column("num_truncated")
