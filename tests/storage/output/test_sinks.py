"""Rows in SQL tables, on both databases, as other readers find them."""

import datetime as dt
import json
import re
import resource
import socket
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sqlalchemy import Connection, Engine, create_engine, event, make_url, text

from headrace.storage.errors import SinkError, SinkUnavailable
from headrace.storage.output import sinks
from headrace.storage.output.parts import output_schema
from headrace.storage.output.sinks import SinkSpec, SqlSink, check_reachable

INPUTS = [
    pa.field("text", pa.string()),
    pa.field("stars", pa.int64()),
    pa.field("price", pa.decimal128(8, 2)),
    pa.field("day", pa.date32()),
    pa.field("at", pa.timestamp("us", "UTC")),
    pa.field("paid", pa.bool_()),
]
SCHEMA = output_schema(INPUTS, choices=("a", "b", "a\0"))


@pytest.fixture
def spec(database_url: str) -> SinkSpec:
    return SinkSpec.parse(database_url, "answers")


@pytest.fixture
def sink(spec: SinkSpec) -> SqlSink:
    sink = SqlSink(spec, SCHEMA)
    sink.prepare()
    return sink


def part(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=SCHEMA)


def execute(spec: SinkSpec, statement: str) -> list[dict[str, Any]]:
    engine = create_engine(spec.url)
    with engine.begin() as connection:
        result = connection.execute(text(statement))
        found = [dict(row) for row in result.mappings()] if result.returns_rows else []
    engine.dispose()
    return found


def test_rows_have_typed_columns(spec, sink):
    at = dt.datetime(2026, 3, 4, 5, 6, tzinfo=dt.UTC)
    row = {"row": 7, "custom_id": "x", "text": "naïve", "stars": 2**40, "paid": True, "label": "a", "confidence": 0.75}
    more = {"price": Decimal("12.50"), "day": at.date(), "at": at, "probabilities": {"a": 0.75, "b": 0.25}}
    sink.upsert("job", 1, part(row | more, {"row": 8, "custom_id": "y", "error": "no"}))
    first, second = execute(spec, "select * from answers order by row")
    assert (first["job_id"], first["row"], first["text"], first["stars"]) == ("job", 7, "naïve", 2**40)
    assert (first["label"], first["confidence"], bool(first["paid"])) == ("a", 0.75, True)
    assert Decimal(str(first["price"])) == Decimal("12.5")
    assert str(first["day"]) == "2026-03-04"
    assert (second["error"], second["label"], second["probabilities"]) == ("no", None, None)
    assert execute(spec, "select sum(confidence) as total from answers where stars > 1000") == [{"total": 0.75}]


def test_a_row_written_again_is_there_once(spec, sink):
    sink.upsert("job", 1, part({"row": 0, "error": "failed"}, {"row": 1, "output": "b"}))
    sink.upsert("job", 2, part({"row": 0, "output": "a"}))
    sink.upsert("other", 1, part({"row": 0, "output": "c"}))
    found = execute(spec, "select job_id, row, output, error from answers order by job_id, row")
    assert [tuple(row.values()) for row in found] == [
        ("job", 0, "a", None),
        ("job", 1, "b", None),
        ("other", 0, "c", None),
    ]


def test_an_attempt_that_was_overtaken_overwrites_nothing(spec, sink):
    sink.upsert("job", 2, part({"row": 0, "output": "newer"}))
    sink.upsert("job", 1, part({"row": 0, "output": "older"}))
    assert execute(spec, "select output from answers") == [{"output": "newer"}]


def test_what_a_database_cannot_hold_becomes_what_it_can(spec, sink):
    sink.upsert("job", 1, part({"row": 0, "text": "a\0b", "probabilities": {"a\0": float("nan")}}))
    (row,) = execute(spec, "select * from answers")
    assert row["text"] == "a\ufffdb"
    assert "NaN" not in str(row["probabilities"])


ODD = {
    "clock": (pa.time64("us"), dt.time(1, 2, 3, 4), "01:02:03.000004"),
    "span": (pa.duration("us"), dt.timedelta(days=1, seconds=2), "1 day, 0:00:02"),
    "fine_clock": (pa.time64("ns"), 1_500, "00:00:00.000001"),
    "fine_span": (pa.duration("ns"), 1_500, "0:00:00.000001"),
    "id": (pa.uuid(), uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    "hash": (pa.binary(2), b"\0a", b"\0a"),
    "images": (pa.list_(pa.binary()), [b"a"], ["data:application/octet-stream;base64,YQ=="]),
}


def test_what_sql_has_no_type_for_is_text(spec):
    fields = [pa.field(name, kind) for name, (kind, _, _) in ODD.items()]
    schema = output_schema(fields)
    sink = SqlSink(spec, schema)
    sink.prepare()
    row = {"row": 0} | {name: value for name, (_, value, _) in ODD.items()}
    sink.upsert("job", 1, pa.Table.from_pylist([row, {"row": 1}], schema=schema))
    first, second = execute(spec, "select * from answers order by row")
    for name, (_, _, expected) in ODD.items():
        assert _from_json(first[name], expected) == expected, name
        assert second[name] is None


def _from_json(found: Any, expected: Any) -> Any:
    """SQLite has JSON as text."""
    return json.loads(found) if isinstance(expected, list) and isinstance(found, str) else found


@pytest.mark.parametrize("zone", [None, "UTC"])
def test_times_have_no_nanoseconds(spec, zone, monkeypatch):
    """Python's have none: pyarrow makes pandas' of them, and without pandas, which need not be there, an error."""
    schema = output_schema([pa.field("at", pa.timestamp("ns", zone))])
    sink = SqlSink(spec, schema)
    sink.prepare()
    row = pa.Table.from_pylist([{"row": 0}], schema=schema)
    at = pa.array([1_700_000_000_123_456_789], schema.field("at").type)
    given: list[Any] = []
    upsert = sink._upsert

    def noting(connection: Connection, rows: list[dict[str, Any]]) -> None:
        given.extend(rows)
        upsert(connection, rows)

    monkeypatch.setattr(sink, "_upsert", noting)
    sink.upsert("job", 1, row.set_column(row.schema.get_field_index("at"), "at", at))
    assert [type(each["at"]) for each in given] == [dt.datetime]
    (found,) = execute(spec, "select at from answers")
    assert "22:13:20.123456" in str(found["at"])


def test_preparing_leaves_no_row_and_can_be_repeated(spec, sink):
    sink.prepare()
    assert execute(spec, "select * from answers") == []
    sink.upsert("job", 1, part({"row": 0}))
    sink.prepare()
    assert len(execute(spec, "select * from answers")) == 1


def test_a_table_of_before_gets_the_columns_that_have_come_since(spec):
    old = SqlSink(spec, SCHEMA)
    old.prepare()
    old.upsert("job", 1, part({"row": 0, "label": "a"}))
    new_schema = output_schema(INPUTS, choices=("a", "b", "a\0"), with_doubt_and_receipt=True)
    new = SqlSink(spec, new_schema)
    for _ in range(2):
        new.prepare()
    row = {"row": 0, "label": "b", "margin": 0.5, "receipt": {"weights": "blake2b:1", "attempt": 1}}
    new.upsert("later", 1, pa.Table.from_pylist([row], schema=new_schema))
    # A job that began before goes on.
    old.upsert("job", 1, part({"row": 1, "label": "a"}))
    found = execute(spec, "select job_id, row, label, margin from answers order by job_id, row")
    assert [tuple(each.values()) for each in found] == [
        ("job", 0, "a", None),
        ("job", 1, "a", None),
        ("later", 0, "b", 0.5),
    ]
    (receipt,) = execute(spec, "select receipt from answers where job_id = 'later'")
    assert "blake2b:1" in str(receipt["receipt"])


@pytest.mark.parametrize("first", ["CREATE TABLE", "ALTER TABLE"])
def test_two_jobs_may_prepare_one_table_at_once(spec, first):
    """The other one's statement gets there between our look at the table and our own."""
    if first == "ALTER TABLE":
        SqlSink(spec, SCHEMA).prepare()
    schema = output_schema(INPUTS, choices=("a", "b", "a\0"), with_doubt_and_receipt=True)
    overtaken: list[str] = []

    def overtake(connection: Connection, cursor: Any, statement: str, *_: object) -> None:
        if statement.strip().startswith(first) and not overtaken:
            overtaken.append(statement)
            SqlSink(spec, schema).prepare()

    event.listen(Engine, "before_cursor_execute", overtake)
    try:
        SqlSink(spec, schema).prepare()
    finally:
        event.remove(Engine, "before_cursor_execute", overtake)
    assert overtaken
    assert execute(spec, "select margin, receipt from answers") == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("alter table answers rename column label to tag", "no column 'label'"),
        ("alter table answers add column mine integer", "column 'mine'"),
        ("alter table answers drop column stars; alter table answers add column stars text", "TEXT in column 'stars'"),
    ],
)
def test_a_table_with_other_columns_is_refused_by_name(spec, sink, change, problem):
    for statement in change.split(";"):
        execute(spec, statement)
    with pytest.raises(SinkError, match=f"{problem}.*: choose another sink_table$"):
        sink.prepare()


def test_a_table_without_the_key_is_refused(spec):
    columns = ", ".join(f"{name} text" for name in ("job_id", "attempt_id", "row"))
    execute(spec, f"create table answers ({columns})")
    with pytest.raises(SinkError, match="no column 'custom_id'"):
        SqlSink(spec, SCHEMA).prepare()


def test_an_input_column_of_the_sinks_own_name_is_refused(spec):
    with pytest.raises(SinkError, match="'Job_ID'"):
        SqlSink(spec, output_schema([pa.field("Job_ID", pa.string())]))


@pytest.mark.parametrize("name", ["", "a\0"])
def test_an_input_column_that_no_table_can_have_is_refused(spec, name):
    with pytest.raises(
        SinkError, match=f"a column {re.escape(repr(name))}, which is no name for one of a sink: rename it"
    ):
        SqlSink(spec, output_schema([pa.field(name, pa.string())]))


@pytest.mark.parametrize(
    ("url", "names"),
    [
        ("sqlite:///rows.db", ("Ask", "ask")),
        ("postgresql://user@host/name", ("x" * 63 + "a", "x" * 63 + "b")),
        ("postgresql://user@host/name", ("é" * 31 + "a", "é" * 31 + "aé")),
    ],
)
def test_two_input_columns_that_are_one_to_the_database_are_refused(url, names):
    schema = output_schema([pa.field(name, pa.string()) for name in names])
    with pytest.raises(SinkError, match=f"'{names[0]}' and '{names[1]}' are one to the sink: rename one of them"):
        SqlSink(SinkSpec.parse(url), schema)


@pytest.mark.parametrize("name", ["How much do you agree? " * 4, "ö" * 40, "Ask", '%s "(x):y" ☃'])
def test_two_jobs_may_share_a_table_whatever_their_columns_are_called(spec, name):
    schema = output_schema([pa.field(name, pa.string()), pa.field("ö", pa.string()), pa.field("Ö", pa.string())])
    for job_id in ("one", "other"):
        sink = SqlSink(spec, schema)
        sink.prepare()
        sink.upsert(job_id, 1, pa.Table.from_pylist([{"row": 0, name: "asked"}], schema=schema))
    assert ["asked" in row.values() for row in execute(spec, "select * from answers")] == [True, True]


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("mysql://host/name", "^sink .*mysql"),
        ("nonsense", "^sink .*postgresql://"),
        ("sqlite://", "needs a file"),
        ("postgresql://host:x/name", "^sink must be postgresql://user@host/name"),
    ],
)
def test_what_is_no_sink_is_refused(url, problem):
    with pytest.raises(SinkError, match=problem):
        SinkSpec.parse(url)


def test_a_table_has_a_name(tmp_path):
    with pytest.raises(SinkError, match=r"^sink_table is empty"):
        SinkSpec.parse(f"sqlite:///{tmp_path / 'answers.db'}", "")


def test_a_file_is_meant_from_where_the_job_is_submitted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert SinkSpec.parse("sqlite:///answers.db").url == f"sqlite:///{tmp_path / 'answers.db'}"


@pytest.mark.parametrize(
    ("url", "ledger", "same"),
    [
        ("postgresql://me@host/name", "postgresql+psycopg://me@host:5432/name", True),
        ("postgresql://me@host/name", "postgresql://me@host/other", False),
        ("postgresql://me@host/name", "postgresql://you@host/name", False),
        ("sqlite:////a/../b/ledger.db", "sqlite:////b/ledger.db", True),
        ("sqlite:////b/ledger.db", "postgresql://host//b/ledger.db", False),
    ],
)
def test_whether_it_is_the_ledgers_database(url, ledger, same):
    assert SinkSpec.parse(url).is_in(make_url(ledger)) is same


def test_a_password_is_not_shown_but_kept():
    spec = SinkSpec.parse("postgresql://me:secret@host/name")
    assert "secret" not in str(spec) + repr(spec)
    assert SinkSpec.of(spec.as_dict()) == spec
    assert "secret" in spec.url


def test_a_database_that_does_not_answer_may_be_tried_again(tmp_path: Path):
    for url in (f"sqlite:///{tmp_path}/nowhere/answers.db", f"postgresql://me@/name?host={tmp_path}"):
        with pytest.raises(SinkUnavailable, match="sink "):
            SqlSink(SinkSpec.parse(url), SCHEMA).prepare()


@pytest.mark.parametrize(
    "url",
    [
        "sqlite:////nowhere/answers.db",
        "postgresql://me@nowhere.invalid/name",
        "{server}&user=nobody",
        "{server}&dbname=nothing",
        "{server}&sslmode=some",
    ],
)
def test_a_url_that_leads_nowhere_is_no_database_that_is_away(postgres_server: str, url: str) -> None:
    with pytest.raises(SinkError) as refused:
        check_reachable(SinkSpec.parse(url.format(server=postgres_server)))
    assert not isinstance(refused.value, SinkUnavailable)


def test_a_database_that_is_away_may_be_back_soon(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for url in (f"postgresql://me@127.0.0.1:{port}/name", f"postgresql://me@/name?host={tmp_path}"):
        with pytest.raises(SinkUnavailable, match="Is the server running"):
            check_reachable(SinkSpec.parse(url))


def test_a_table_that_is_gone_may_come_back(spec, sink):
    """Rows that are computed are kept until then: whoever gave them up would have them computed again and again."""
    execute(spec, "drop table answers")
    with pytest.raises(SinkUnavailable, match="answers"):
        sink.upsert("job", 1, part({"row": 0, "output": "a"}))
    sink.prepare()
    sink.upsert("job", 1, part({"row": 0, "output": "a"}))
    assert execute(spec, "select output from answers") == [{"output": "a"}]


def test_a_disk_that_takes_nothing_is_what_is_told_of(tmp_path: Path):
    sink = SqlSink(SinkSpec.parse(f"sqlite:///{tmp_path}/answers.db"), SCHEMA)
    sink.prepare()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256, hard))
    try:
        with pytest.raises(SinkUnavailable, match=r"disk I/O error|disk is full"):
            sink.prepare()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_user_without_permission_is_told(postgres_server):
    admin = SinkSpec.parse(postgres_server, "guarded")
    SqlSink(admin, SCHEMA).prepare()
    try:
        execute(admin, "create role reader login")
        execute(admin, "grant select on guarded to reader")
        reader = SinkSpec.parse(postgres_server.replace("postgres@", "reader@"), "guarded")
        with pytest.raises(SinkError, match="permission denied"):
            SqlSink(reader, SCHEMA).prepare()
    finally:
        execute(admin, "drop table guarded")
        execute(admin, "drop role reader")


@pytest.mark.parametrize("is_ledgers", [False, True], ids=["a database of its own", "in a transaction of the ledger's"])
def test_a_table_that_somebody_has_locked_is_not_waited_for_in_silence(postgres_server, monkeypatch, is_ledgers):
    """Nobody else hears of such a wait, and it would not end when the worker is told to stop."""
    monkeypatch.setattr(sinks, "_LOCK_SECONDS", 0.2)
    spec = SinkSpec.parse(postgres_server, "locked")
    sink = SqlSink(spec, SCHEMA)
    sink.prepare()
    engine = create_engine(spec.url)
    row = part({"row": 0, "output": "a"})
    try:
        with engine.begin() as other:
            other.execute(text("lock table locked"))
            with engine.connect() as ledgers, pytest.raises(SinkUnavailable, match="lock timeout"):
                sink.upsert("job", 1, row, ledgers if is_ledgers else None)
        with engine.begin() as ledgers:
            sink.upsert("job", 1, row, ledgers if is_ledgers else None)
            # What comes after it in the transaction waits as it did before.
            assert ledgers.execute(text("show lock_timeout")).scalar() == "0"
        assert execute(spec, "select output from locked") == [{"output": "a"}]
    finally:
        engine.dispose()
        execute(spec, "drop table locked")
