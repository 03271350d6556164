"""Rows of a SQL query as an input, of either database."""

from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from sqlalchemy import text as text_clause

from headrace.storage.errors import InputError
from headrace.storage.readers import open_sql
from headrace.storage.rows.columns import carried_values, column_array


@pytest.fixture
def shop_url(database_url: str) -> str:
    engine = create_engine(database_url)
    with engine.begin() as connection:
        connection.execute(text_clause("create table orders (id integer, note text)"))
        insert = text_clause("insert into orders values (:id, :note)")
        connection.execute(insert, [{"id": number, "note": f"n{number}"} for number in range(3000)])
    engine.dispose()
    return database_url


def test_a_query(shop_url: str) -> None:
    source = open_sql(shop_url, "select note, id * 2 as twice from orders order by id")
    assert source.columns == ["note", "twice"]
    assert [(row.row, row.values) for row in source] == [
        (number, {"note": f"n{number}", "twice": 2 * number}) for number in range(3000)
    ]
    assert len(list(open_sql(shop_url, "select * from orders", limit=5))) == 5


def test_what_json_cannot_write_is_text(shop_url: str) -> None:
    """Every row goes on as JSON does: bytes as data URLs, as images are."""
    expected: dict[str, Any] = {"price": 1.5}
    query = "select x'01ff' as file, 1.5 as price"
    if shop_url.startswith("postgresql"):
        query = (
            "select '\\x01ff'::bytea as file, 1.50::numeric as price, date '2026-01-02' as day, "
            "array[1.50::numeric, null] as list, json_build_object('a', 1) as fields"
        )
        expected = {"price": "1.50", "day": "2026-01-02", "list": ["1.50", None], "fields": {"a": 1}}
    (row,) = (source := open_sql(shop_url, query))
    assert row.values == {"file": "data:application/octet-stream;base64,Af8=", **expected}
    (unifier := source.unifier()).observe(row.values)
    for field in unifier.schema():
        assert carried_values(column_array([row.values[field.name]], field), field) == [row.values[field.name]]


def test_a_querys_colons_are_its_own(shop_url: str) -> None:
    source = open_sql(
        shop_url, "select cast(id as text) || ' :id 1:2' as note from orders where note <> ':n%' order by id"
    )
    assert next(iter(source)).values == {"note": "0 :id 1:2"}


@pytest.mark.parametrize("scheme", ["postgresql+psycopg", "postgresql", "postgres"])
def test_a_database_that_does_not_answer(scheme: str) -> None:
    """PostgreSQL has the names here that it has as a ledger and as a sink."""
    with pytest.raises(InputError, match=r"^sql cannot be reached: .*refused"):
        open_sql(f"{scheme}://nobody@127.0.0.1:1/none", "select 1")


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("select * from nothing", "^query failed: .*nothing"),
        ("selct", "^query failed: "),
        ("select * from orders where id < 0", "^input of the query has no rows"),
        ("select id, note as id from orders", "2 columns named 'id'"),
        ("delete from orders", "^query (returns no rows: use a SELECT|failed: syntax error)"),
        ("drop table orders", "^query (returns no rows: use a SELECT|failed: syntax error)"),
        ("alter table orders drop column id", "^query (returns no rows: use a SELECT|failed: syntax error)"),
    ],
)
def test_an_unusable_query(query: str, message: str, shop_url: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        open_sql(shop_url, query)
    assert "\n" not in str(caught.value)
    assert len(list(open_sql(shop_url, "select id from orders"))) == 3000


@pytest.mark.parametrize("url", ["nosuch://x", "no url", "sqlite:////no/such/folder/a.db"])
def test_an_unusable_database(url: str) -> None:
    with pytest.raises(InputError, match=r"^sql is not a database|^sql: there is no file '/no/such/folder/a.db'"):
        open_sql(url, "select 1")


def test_a_missing_database_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"there is no file .*nowhere\.db"):
        open_sql(f"sqlite:///{tmp_path / 'nowhere.db'}", "select 1")
    assert not (tmp_path / "nowhere.db").exists()
