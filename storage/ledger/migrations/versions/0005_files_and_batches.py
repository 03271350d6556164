"""Files and batches of the OpenAI-compatible API."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("filename", sa.Text, nullable=False),
        sa.Column("num_bytes", sa.BigInteger, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double),
        sa.PrimaryKeyConstraint("id", name="pk_files"),
    )
    op.create_index("ix_files_tenant_created_at", "files", ["tenant", "created_at"])
    op.create_index("ix_files_expires_at", "files", ["expires_at"])
    op.create_table(
        "batches",
        sa.Column("id", sa.String(64), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("input_file_id", sa.String(64), nullable=False),
        sa.Column("completion_window", sa.String(32), nullable=False),
        sa.Column("metadata", sa.JSON(none_as_null=True)),
        sa.Column("output_expires_seconds", sa.Integer),
        sa.Column("job_id", sa.String(64)),
        sa.Column("model", sa.Text),
        sa.Column("errors", sa.JSON(none_as_null=True)),
        sa.Column("output_file_id", sa.String(64)),
        sa.Column("error_file_id", sa.String(64)),
        sa.Column("ending", sa.String(16)),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
        sa.Column("in_progress_at", sa.Double),
        sa.Column("finalizing_at", sa.Double),
        sa.Column("completed_at", sa.Double),
        sa.Column("failed_at", sa.Double),
        sa.Column("expired_at", sa.Double),
        sa.Column("cancelling_at", sa.Double),
        sa.Column("cancelled_at", sa.Double),
        sa.Column("num_total", sa.Integer),
        sa.Column("num_completed", sa.Integer),
        sa.Column("num_failed", sa.Integer),
        sa.Column("prompt_tokens", sa.BigInteger),
        sa.Column("cached_tokens", sa.BigInteger),
        sa.Column("completion_tokens", sa.BigInteger),
        sa.Column("lease_owner", sa.String(64)),
        sa.Column("lease_expires_at", sa.Double),
        sa.PrimaryKeyConstraint("id", name="pk_batches"),
    )
    op.create_index("ix_batches_tenant_created_at", "batches", ["tenant", "created_at"])
    op.create_index("ix_batches_state", "batches", ["state"])


def downgrade() -> None:
    op.drop_table("batches")
    op.drop_table("files")
