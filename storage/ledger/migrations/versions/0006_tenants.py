"""Tenants and their API keys; whose job each is."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("requests_per_minute", sa.Integer),
        sa.Column("queued_tokens", sa.BigInteger),
        sa.Column("concurrent_jobs", sa.Integer),
        sa.Column("weight", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_tenants"),
    )
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("name", sa.Text),
        sa.Column("prefix", sa.String(16), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("revoked_at", sa.Double),
        sa.Column("last_used_at", sa.Double),
        sa.PrimaryKeyConstraint("id", name="pk_api_keys"),
        sa.ForeignKeyConstraint(["tenant"], ["tenants.name"], name="fk_api_keys_tenant_tenants"),
    )
    op.create_index("ix_api_keys_prefix", "api_keys", ["prefix"])
    op.add_column("jobs", sa.Column("tenant", sa.String(64), nullable=False, server_default="default"))
    op.drop_index("ix_jobs_idempotency_key", "jobs")
    op.create_index("ix_jobs_tenant_idempotency_key", "jobs", ["tenant", "idempotency_key"], unique=True)
    op.create_index("ix_jobs_tenant_created_at", "jobs", ["tenant", "created_at"])


def downgrade() -> None:
    op.drop_index("ix_jobs_tenant_created_at", "jobs")
    op.drop_index("ix_jobs_tenant_idempotency_key", "jobs")
    op.create_index("ix_jobs_idempotency_key", "jobs", ["idempotency_key"], unique=True)
    with op.batch_alter_table("jobs") as table:
        table.drop_column("tenant")
    op.drop_table("api_keys")
    op.drop_table("tenants")
