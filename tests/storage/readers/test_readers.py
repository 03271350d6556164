"""Inputs of every format, good and bad."""

import codecs
import datetime
import gzip
import hashlib
import json
import os
import tracemalloc
from pathlib import Path
from random import Random
from typing import Any

import fsspec
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.storage.errors import InputError
from headrace.storage.readers import InputRow, csv_lines, json_lines, open_input


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def rows(path: Path, limit: int | None = None) -> list[InputRow]:
    return list(open_input(path, limit))


@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.JSONL"])
def test_jsonl(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, name, '{"text": "é\u2028x", "n": 1}\n\n  \r\n{"text": null, "more": [1]}')
    source = open_input(path)
    assert source.columns == ["text", "n"]
    assert not source.has_fixed_columns
    expected = [InputRow(0, {"text": "é\u2028x", "n": 1}), InputRow(1, {"text": None, "more": [1]})]
    assert list(source) == list(source) == expected
    assert source.columns == ["text", "n", "more"]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b'{"a": 1', "not valid JSON: Expecting ',' delimiter at column 8"),
        (b"plain", "not valid JSON: Expecting value at column 1"),
        (b'{"a": "b', "not valid JSON: Unterminated string starting at column 7"),
        (b'{"a": 1},', "not valid JSON: Extra data at column 9: ','"),
        (b'{"a": 1} ' + b"7" * 50, f"not valid JSON: Extra data at column 10: '{'7' * 20}…'"),
        (b"[1]", "not a JSON object but an array"),
        (b"7", "not a JSON object but a number"),
        (b'"x"', "not a JSON object but a string"),
        (b"null", "not a JSON object but null"),
        (b'{"a": NaN}', "not JSON, which has no NaN: write null"),
        (b'{"a": "\x81"}', "not valid UTF-8: convert the file (iconv -f ENCODING -t UTF-8, with the one that it has)"),
        (b'{"a": "\\ud83d"}', "not valid text: an escape is half of a surrogate pair"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON: a number is too long"),
        (b"[" * 100_000, "not valid JSON: nested too deep"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "lists and objects are nested deeper than 200"),
        (b'{"a": ' * 201 + b"1" + b"}" * 201, "lists and objects are nested deeper than 200"),
    ],
    ids=lambda value: value if isinstance(value, str) else "line",
)
def test_bad_json_line_is_an_error_row_with_its_number(line: bytes, error: str, tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", b'{"a": 0}\n\n' + line + b'\n{"a": 2}\n')
    good, bad, next_good = rows(path)
    assert bad == InputRow(1, {}, f"line 3: {error}")
    assert (good.values, next_good) == ({"a": 0}, InputRow(2, {"a": 2}))


@pytest.mark.parametrize(
    "value", [json.loads("[" * 199 + "]" * 199), [[{}]] * 300, "[" * 300], ids=["as deep as may be", "wide", "text"]
)
def test_json_that_is_not_nested_too_deep(value: Any, tmp_path: Path) -> None:
    assert rows(write(tmp_path, "a.jsonl", json.dumps({"a": value})))[0].values == {"a": value}


def test_surrogate_pair_is_text(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", '{"a": "\\ud83d\\ude00"}')
    assert rows(path)[0].values == {"a": "😀"}


def test_byte_order_mark(tmp_path: Path) -> None:
    assert rows(write(tmp_path, "a.jsonl", codecs.BOM_UTF8 + b'{"a": 1}'))[0].values == {"a": 1}
    assert rows(write(tmp_path, "a.csv", codecs.BOM_UTF8 + b"a\n1"))[0].values == {"a": "1"}


def test_csv(tmp_path: Path) -> None:
    content = 'id,text,\r\n007,"a ""quoted"", text\nof two lines",\r\n\r\n8,é,x\r\n'
    source = open_input(write(tmp_path, "a.csv", content))
    assert source.columns == ["id", "text", "column_3"]
    assert source.has_fixed_columns
    assert list(source) == [
        InputRow(0, {"id": "007", "text": 'a "quoted", text\nof two lines', "column_3": ""}),
        InputRow(1, {"id": "8", "text": "é", "column_3": "x"}),
    ]


def test_tabs(tmp_path: Path) -> None:
    path = write(tmp_path, "a.tsv", 'text\tn\n"one, two"\t1\nx\n')
    assert rows(path) == [
        InputRow(0, {"text": "one, two", "n": "1"}),
        InputRow(1, {}, "line 3: number of fields is 1, the header has 2"),
    ]


@pytest.mark.parametrize(
    ("name", "content", "row"),
    [
        ("a.csv", 'text;n\r\n"one; two";1,5\r\n', {"text": "one; two", "n": "1,5"}),
        ("a.csv", '"text";"n, or so"\none, two;1\n', {"text": "one, two", "n, or so": "1"}),
        ("a.csv", "text\tn\none;two\t1\n", {"text": "one;two", "n": "1"}),
        ("a.csv", "text,n;m\none,1\n", {"text": "one", "n;m": "1"}),
        ("a.csv", '"a;b"\n1;2\n', {"a;b": "1;2"}),
        ("a.csv", "text\none; two\n", {"text": "one; two"}),
        ("a.tsv", "text,label\none,1\n", {"text": "one", "label": "1"}),
        ("a.tsv", "text, if any\tn\none\t1\n", {"text, if any": "one", "n": "1"}),
    ],
)
def test_what_separates_fields_is_what_makes_columns_of_the_header(
    name: str, content: str, row: dict[str, str], tmp_path: Path
) -> None:
    assert rows(write(tmp_path, name, content))[0].values == row


def test_bad_csv_record_is_an_error_row_with_its_line(tmp_path: Path) -> None:
    content = b'a,b\n1,"x\ny"\n\n1\n1,2,3\n"a"b,2\n\xff,1\n3,4\n5,"never closed\n6,7\n'
    problems = [(row.row, row.error) for row in rows(write(tmp_path, "a.csv", content)) if row.error]
    assert problems == [
        (1, "line 5: number of fields is 1, the header has 2"),
        (2, "line 6: number of fields is 3, the header has 2"),
        (3, "line 7: not valid CSV: ',' expected after '\"'"),
        (4, "line 8: not valid UTF-8: convert the file (iconv -f WINDOWS-1252 -t UTF-8, if 'ÿ' is what it says)"),
        (6, "line 10: not valid CSV: a quote is not closed, so that all lines after it are part of this row"),
    ]


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("vielen Grüßen an", "Grüßen"),
        ("I don’t know", "don’t"),
        ("“all”", "“all"),
        ("5 € less", "€"),
        ("x" * 100 + "é" + "x" * 100, "x" * 20 + "é" + "x" * 19),
    ],
)
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl", "a.json"])
def test_a_row_in_windows_1252_says_how_to_convert_it(name: str, text: str, word: str, tmp_path: Path) -> None:
    """By a word of its own, as any bytes are letters in that encoding."""
    good = {"a": "good"}
    written = {
        "a.csv": f"a\n{text}\ngood\n",
        "a.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ({"a": text}, good)),
        "a.json": json.dumps([{"a": text}, good], ensure_ascii=False),
    }[name]
    bad, next_good = rows(write(tmp_path, name, written.encode("cp1252")))
    assert bad.error is not None
    assert bad.error.endswith(f"convert the file (iconv -f WINDOWS-1252 -t UTF-8, if {word!r} is what it says)")
    assert next_good.values == good


def test_long_csv_field(tmp_path: Path) -> None:
    assert len(rows(write(tmp_path, "a.csv", "a\n" + "x" * 500_000))[0].values["a"]) == 500_000


def test_parquet(tmp_path: Path) -> None:
    times = pa.array([0, 1_000_001, None], pa.timestamp("ns", "UTC"))
    table = pa.table({"n": pa.array([1, 2, None], pa.uint8()), "t": times, "l": [["a"], [], None]})
    pq.write_table(table, tmp_path / "a.parquet")
    source = open_input(tmp_path / "a.parquet")
    assert source.columns == ["n", "t", "l"]
    first, second, third = source
    assert first.values["n"] == 1
    assert first.values["l"] == ["a"]
    assert second.values["t"] == "1970-01-01 00:00:00.001000001Z"
    assert third.values == {"n": None, "t": None, "l": None}
    assert source.unifier().schema() == table.schema


def test_parquet_times_without_nanoseconds_are_pythons(tmp_path: Path) -> None:
    table = pa.table({"t": pa.array([1_000_000], pa.timestamp("ns"))})
    pq.write_table(table, tmp_path / "a.parquet")
    assert rows(tmp_path / "a.parquet")[0].values == {"t": datetime.datetime(1970, 1, 1, 0, 0, 0, 1000)}


@pytest.mark.parametrize(
    ("kind", "plain", "value"),
    [
        (pa.string_view(), pa.string(), "x"),
        (pa.binary_view(), pa.binary(), b"x"),
        (pa.list_(pa.string_view()), pa.list_(pa.string()), ["x"]),
        (pa.large_list(pa.string_view()), pa.large_list(pa.string()), ["x"]),
        (pa.struct({"a": pa.string_view()}), pa.struct({"a": pa.string()}), {"a": "x"}),
        (pa.map_(pa.string_view(), pa.int64()), pa.map_(pa.string(), pa.int64()), [("x", 1)]),
    ],
    ids=str,
)
def test_views_in_parquet_are_plain(kind: pa.DataType, plain: pa.DataType, value: Any, tmp_path: Path) -> None:
    """Arrow takes no rows of a table that has views, as a job does."""
    pq.write_table(pa.table({"n": pa.array([value, None], kind)}), tmp_path / "a.parquet")
    source = open_input(tmp_path / "a.parquet")
    assert source.unifier().schema().field("n").type == plain
    assert [row.values["n"] for row in source] == [value, None]


def test_times_that_python_has_not_are_refused_by_name(tmp_path: Path) -> None:
    times = pa.array([10**18, None], pa.timestamp("us"))
    pq.write_table(pa.table({"text": ["a", "b"], "at": times}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match="column 'at' has a time before the year 1 or after 9999: make it a text"):
        rows(tmp_path / "a.parquet")


def test_parquet_of_several_batches(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": range(5000)}), tmp_path / "a.parquet", row_group_size=700)
    assert [(row.row, row.values["n"]) for row in open_input(tmp_path / "a.parquet")] == [
        (number, number) for number in range(5000)
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.txt",
            "x",
            "the format '.txt' is not known: use .jsonl, .ndjson, .json, .csv, .tsv (also with .gz or .zst) or "
            ".parquet",
        ),
        ("a", "x", "a file without an extension is not known"),
        ("a.txt.gz", "x", "the format '.txt' is not known"),
        ("a.gz", "x", "a file without an extension is not known"),
        ("a.jsonl.gz", "x", "cannot be read: Not a gzipped file"),
        ("a.jsonl.zst", "x", "cannot be read: ZSTD decompress failed"),
        ("a.jsonl", "", "has no rows"),
        ("a.jsonl", "\n \n", "has no rows"),
        ("a.csv", "", "has no header"),
        ("a.csv", "a,b\n", "has no rows"),
        ("a.csv", "a,b,a\n1,2,3\n", "has 2 columns named 'a': rename all but one"),
        ("a.csv", 'a,"b\n1,2\n', "check its quotes"),
        ("a.csv", "a\n1\n".encode("utf-16"), "is UTF-16: save it as UTF-8 (iconv -f UTF-16 -t UTF-8)"),
        ("a.csv", "a\n1\n".encode("utf-16-le"), "is UTF-16: save it as UTF-8 (iconv -f UTF-16LE -t UTF-8)"),
        ("a.jsonl", "{}\n".encode("utf-16-be"), "is UTF-16: save it as UTF-8 (iconv -f UTF-16BE -t UTF-8)"),
        ("a.csv", gzip.compress(b"a\n1\n", mtime=0), "is compressed with gzip: let its name end in .csv.gz"),
        ("a.jsonl", b"(\xb5/\xfd...", "is compressed with zstd: let its name end in .jsonl.zst"),
        ("a.JSON", b"PAR1\x15...", "is Parquet: let its name end in .parquet"),
        ("a.tsv", b"PK\x03\x04...", "is a zip file, as spreadsheets are: save it as .tsv"),
        ("a.csv", "Größe,n\n1,2\n".encode("latin-1"), "is not valid UTF-8: convert the file (iconv -f WINDOWS-1252 -t"),
        ("a.parquet", "not parquet", "cannot be read: Parquet"),
        ("a.parquet", "", "cannot be read: Parquet file size is 0 bytes"),
    ],
)
def test_unusable_input(name: str, content: str | bytes, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, name, content)
    with pytest.raises(InputError) as caught:
        open_input(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.json.gz"])
@pytest.mark.parametrize("numbers", [[0, 1], [7, 3], [0]])
def test_the_columns_of_a_data_frame_are_not_one_row(name: str, numbers: list[int], tmp_path: Path) -> None:
    """As `DataFrame.to_json` writes them unless told otherwise."""
    pd.DataFrame({"text": ["a"] * len(numbers), "n": 1}, index=numbers).to_json(tmp_path / name)
    with pytest.raises(InputError, match=r'has columns, not rows: .* to_json\(…, orient="records", lines=True\)$'):
        open_input(tmp_path / name)


@pytest.mark.parametrize(
    "row", [{"a": {"name": 1}}, {"a": {"0": 1}, "b": 2}, {"a": {"0": 1}, "b": {"1": 1}}, {"a": {}}, {}]
)
def test_a_row_of_objects_is_one(row: dict[str, Any], tmp_path: Path) -> None:
    assert rows(write(tmp_path, "a.json", json.dumps(row)))[0].values == row
    of_columns = json.dumps({"a": {"0": 1}})
    assert len(rows(write(tmp_path, "b.jsonl", f"{of_columns}\n{of_columns}\n"))) == 2


def test_input_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist: check the path"):
        open_input(tmp_path / "missing.csv")
    with pytest.raises(
        InputError, match=r"has no file that ends in \.jsonl, \.ndjson, \.json, \.csv, \.tsv, \.parquet"
    ):
        open_input(tmp_path)


def test_a_pipe_by_name_is_refused_with_nothing_taken_out_of_it(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b'{"a": 1}\n')
    os.close(writing)
    for name in ("rows.jsonl", "rows"):
        (tmp_path / name).symlink_to(f"/proc/self/fd/{reading}")
        with pytest.raises(InputError, match=rf"input \S*/{name} is a pipe or a device, .*: write it into a file"):
            open_input(tmp_path / name)
    assert os.read(reading, 100) == b'{"a": 1}\n'
    os.close(reading)


def test_an_address_from_the_home_folder_and_one_that_is_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, "a.csv", "x\n1\n")
    assert open_input("~/a.csv").columns == ["x"]
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="input is empty: name a file or a folder"):
        open_input("")


def test_parquet_without_rows_or_with_two_columns_of_one_name(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"a": pa.array([], pa.string())}), path)
    with pytest.raises(InputError, match="has no rows"):
        open_input(path)
    pq.write_table(pa.table([[1], [2]], names=["a", "a"]), path)
    with pytest.raises(InputError, match="2 columns named 'a'"):
        open_input(path)


def test_parquet_damaged_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table({"a": [f"{n}" for n in range(20_000)]})
    pq.write_table(table, path, row_group_size=2000, compression="zstd", use_dictionary=False)
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 200] = bytes(200)
    path.write_bytes(content)
    source = open_input(path)
    with pytest.raises(InputError, match="cannot be read"):
        list(source)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_limit(name: str, tmp_path: Path) -> None:
    content = '{"a": 1}\n{\n{"a": 3}\n' if name == "a.jsonl" else "a\n1\n1,1\n3\n"
    path = write(tmp_path, name, content)
    assert [bool(row.error) for row in rows(path, limit=2)] == [False, True]
    assert len(rows(path, limit=10)) == 3
    with pytest.raises(InputError, match=r"^limit 0 leaves no rows"):
        open_input(path, limit=0)


def test_reading_is_a_stream(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", '{"a": 1}\n')
    with path.open("a") as file:
        source = iter(open_input(path))
        assert next(source).values == {"a": 1}
        file.write('{"a": 2}\n')
        file.flush()
        assert next(source).values == {"a": 2}


def test_fingerprint(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "a\n1\n")
    assert open_input(path).fingerprint() == hashlib.sha256(b"a\n1\n").hexdigest()


text = st.text(st.characters(exclude_categories=["Cs"]))
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text


@settings(
    deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(objects=st.lists(st.dictionaries(text, scalars), min_size=1), ascii_only=st.booleans())
def test_any_json_comes_back(objects: list[dict[str, Any]], ascii_only: bool, tmp_path: Path) -> None:
    lines = "\n".join(json.dumps(value, ensure_ascii=ascii_only) for value in objects)
    assert [row.values for row in rows(write(tmp_path, "any.jsonl", lines))] == objects


def compressed(content: bytes, suffix: str) -> bytes:
    if suffix == ".gz":
        return gzip.compress(content)
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize("suffix", [".gz", ".zst", ".GZ"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_compressed_text(name: str, suffix: str, tmp_path: Path) -> None:
    content = '{"a": "é"}\n{\n{"a": "3"}\n' if name == "a.jsonl" else "a\né\n1,1\n3\n"
    plain = write(tmp_path, name, content)
    # Two compressed streams, one after the other, are one file: logs are written so.
    data = b"".join(compressed(part, suffix.lower()) for part in (content.encode()[:7], content.encode()[7:]))
    assert rows(write(tmp_path, name + suffix, data)) == rows(plain)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_truncated_compressed_text_is_named(suffix: str, tmp_path: Path) -> None:
    generator = Random(1)
    lines = "".join(json.dumps({"a": str(generator.random())}) + "\n" for _ in range(60_000))
    path = write(tmp_path, f"a.jsonl{suffix}", compressed(lines.encode(), suffix)[:-1000])
    source = open_input(path)
    with pytest.raises(InputError, match="cannot be read"):
        list(source)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "folder"])
def test_a_url(name: str, tmp_path: Path) -> None:
    """fsspec's own memory file system: no server, but no local file either."""
    filesystem = fsspec.filesystem("memory")
    path = f"/{tmp_path.name}/{name}"
    filesystem.pipe(path if name == "a.jsonl.gz" else f"{path}/a.jsonl.gz", gzip.compress(b'{"a": 1}\n'))
    assert [row.values for row in open_input(f"memory:/{path}")] == [{"a": 1}]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("memory://nowhere.csv", "input memory://nowhere.csv does not exist"),
        ("nosuch://user:secret@host/a.csv", "input nosuch://host/a.csv cannot be opened: Protocol not known: nosuch"),
    ],
)
def test_an_unusable_url(url: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        open_input(url)
    assert str(caught.value).startswith(message)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("max_bytes", [40, 41, 12])
def test_a_line_that_is_too_long_is_an_error_row(
    max_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", max_bytes)
    long = json.dumps({"a": "x" * 600})
    found = rows(write(tmp_path, "rows.jsonl", "\n".join(['{"a": 1}', long, '{"a": 2}', long])))
    assert [row.values for row in found] == [{"a": 1}, {}, {"a": 2}, {}]
    problem = f"longer than {max_bytes} bytes"
    assert [row.error for row in found] == [None, f"line 2: {problem}", None, f"line 4: {problem}"]


def test_of_a_line_that_is_too_long_no_more_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte of gzip may be one of a gigabyte."""
    monkeypatch.setattr(json_lines, "MAX_LINE_BYTES", 2**20)
    content = gzip.compress(b'{"a": "' + b"x" * 2**25 + b'"}\n{"a": 1}\n')
    path = write(tmp_path, "rows.jsonl.gz", content)
    tracemalloc.start()
    try:
        assert [row.values for row in rows(path)] == [{}, {"a": 1}]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**23


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_a_csv_record_that_is_too_long_is_an_error_row(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_lines, "MAX_RECORD_CHARACTERS", 40)
    x, words = "x" * 600, '"' + f'one, ""two""{end}' * 30
    lines = ["a,b", "1,2", f"3,{x}", "4,5", f'{words}",6', f'"7{end}8",{x}', "9,10", f"{x},{x},{x}", "11,12"]
    lines.append(f'13,"{x}')
    found = rows(write(tmp_path, "a.csv", end.join(lines).encode()))
    assert [tuple(row.values.values()) for row in found if row.error is None] == [
        ("1", "2"),
        ("4", "5"),
        ("9", "10"),
        ("11", "12"),
    ]
    problem = "longer than 40 characters, most of them in column"
    assert [row.error for row in found if row.error] == [
        f"line 3: {problem} 'b'",
        f"line 5: {problem} 'a'",
        f"line 36: {problem} 'b'",
        f"line 39: {problem} 'a'",
        f"line 41: {problem} 'b'",
    ]


def test_a_csv_header_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_lines, "MAX_RECORD_CHARACTERS", 40)
    with pytest.raises(InputError, match="has a header longer than 40 characters: check its quotes"):
        open_input(write(tmp_path, "a.csv", 'a,"b' + "x" * 100 + "\n1,2\n"))


def test_of_a_csv_record_that_is_too_long_no_more_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_lines, "MAX_RECORD_CHARACTERS", 2**20)
    path = write(tmp_path, "rows.csv.gz", gzip.compress(b"a\n" + b"x" * 2**25 + b"\n1\n"))
    tracemalloc.start()
    try:
        assert [row.values for row in rows(path)] == [{}, {"a": "1"}]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**23
