"""The database's clock, so that leases mean the same on every host."""

from typing import Any

from sqlalchemy import Double
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler
from sqlalchemy.sql.functions import FunctionElement


class now(FunctionElement[float]):  # noqa: N801 - reads as the SQL function it is
    """Seconds since the epoch when the statement began, in the database."""

    type = Double()
    name = "now"
    inherit_cache = True


@compiles(now, "sqlite")
def _sqlite_now(element: now, compiler: SQLCompiler, **options: Any) -> str:
    # unixepoch('subsec') wants SQLite 3.42; 2440587.5 is the Julian day of the epoch.
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now, "postgresql")
def _postgresql_now(element: now, compiler: SQLCompiler, **options: Any) -> str:
    # clock_timestamp() is volatile, which would keep the sweeper's queries from their indexes.
    return "CAST(EXTRACT(EPOCH FROM statement_timestamp()) AS DOUBLE PRECISION)"
