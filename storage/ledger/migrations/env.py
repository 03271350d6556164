"""Alembic's entry. `storage/ledger/migrate.py` runs it inside its own transaction; the alembic command does not."""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=context.config.attributes["target_metadata"],
)
context.run_migrations()
