"""How much of a job's prompts begins alike."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_COLUMNS = ("prompt_tokens", "shareable_tokens", "shared_tokens")


def upgrade() -> None:
    for name in _COLUMNS:
        op.add_column("jobs", sa.Column(name, sa.BigInteger))


def downgrade() -> None:
    with op.batch_alter_table("jobs") as table:
        for name in _COLUMNS:
            table.drop_column(name)
