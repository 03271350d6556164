"""Which models the server that took a batch serves: another one leaves their batches to it."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("batches", sa.Column("served_models", sa.JSON(none_as_null=True)))


def downgrade() -> None:
    with op.batch_alter_table("batches") as table:
        table.drop_column("served_models")
