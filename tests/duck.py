"""DuckDB, as users read results with it."""

from typing import Any


def read_by_duckdb(query: str) -> list[tuple[Any, ...]]:
    # With modules, of which nothing is taken down at the end, it would stay too, and report all it has as leaked.
    import duckdb

    with duckdb.connect() as connection:
        return connection.execute(query).fetchall()
