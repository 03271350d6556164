"""A JSON array of objects, wherever what is read at a time ends."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.storage.errors import InputError
from headrace.storage.readers import InputRow, json_array, open_input

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=5)


def write(folder: Path, content: str | bytes, name: str = "a.json") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


@pytest.mark.parametrize("prefix", [b"", b"\xef\xbb\xbf", b" \n"], ids=["plain", "byte order mark", "space"])
def test_elements_are_rows(prefix: bytes, tmp_path: Path) -> None:
    content = prefix + '[{"text": "é", "n": 1},\n {"text": null, "more": [1]}\r\n]\n'.encode()
    source = open_input(write(tmp_path, content))
    assert source.columns == ["text", "n"]
    expected = [InputRow(0, {"text": "é", "n": 1}), InputRow(1, {"text": None, "more": [1]})]
    assert list(source) == list(source) == expected
    assert source.columns == ["text", "n", "more"]
    assert list(open_input(write(tmp_path, gzip.compress(content), "a.json.gz"))) == expected


def test_a_file_of_lines_may_have_this_name_too(tmp_path: Path) -> None:
    assert [row.values for row in open_input(write(tmp_path, '{"a": 1}\n{"a": 2}\n'))] == [{"a": 1}, {"a": 2}]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(
    objects=st.lists(st.dictionaries(st.text(), VALUES), min_size=1, max_size=5),
    indent=st.none() | st.integers(0, 2),
    ascii_only=st.booleans(),
    num_characters=st.integers(1, 20),
)
def test_any_array_comes_back(
    objects: list[dict[str, Any]], indent: int | None, ascii_only: bool, num_characters: int, tmp_path: Path
) -> None:
    path = write(tmp_path, json.dumps(objects, indent=indent, ensure_ascii=ascii_only))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_array, "_PIECE_CHARACTERS", num_characters)
        assert [row.values for row in open_input(path)] == objects


@pytest.mark.parametrize(
    ("element", "error"),
    [
        (b"7", "not a JSON object but a number"),
        (b"null", "not a JSON object but null"),
        (b'{"a": NaN}', "not JSON, which has no NaN: write null"),
        (b'{"a": "\x81"}', "not valid UTF-8: convert the file (iconv -f ENCODING -t UTF-8, with the one that it has)"),
        (b'{"a": "\\ud83d"}', "not valid text: an escape is half of a surrogate pair"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON: a number is too long"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", "lists and objects are nested deeper than 200"),
    ],
    ids=lambda value: value if isinstance(value, str) else "element",
)
def test_an_element_that_is_no_object_is_an_error_row_with_its_line(element: bytes, error: str, tmp_path: Path) -> None:
    good, bad, next_good = open_input(write(tmp_path, b'[\n{"a":\n0},\n' + element + b',\n{"a": 2}\n]'))
    assert bad == InputRow(1, {}, f"line 4: {error}")
    assert (good.values, next_good) == ({"a": 0}, InputRow(2, {"a": 2}))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"a": 1},\n{"a": 2}', "line 2: the file ends within the array"),
        ('[{"a": 1},\n', "line 2: the file ends within the array"),
        ('[{"a": 1},\n]', "line 2: expected an element, not ]"),
        ('[{"a": 1}\n{"a": 2}]', "line 2: expected , or ], not {"),
        ('[{"a": 1},\n{\n"b"}]', "line 3: not valid JSON: Expecting ':' delimiter"),
        ('[{"a": 1},\n{"b": "c', "line 2: not valid JSON: Unterminated string starting"),
        ('[{"a": 1},\n' + "[" * 100_000, "line 2: not valid JSON: nested too deep"),
        ('[{"a": 1}]\n[{"a": 2}]', "line 2: something follows the array: keep one array a file"),
    ],
)
def test_broken_syntax_ends_the_reading_at_its_line(content: str, message: str, tmp_path: Path) -> None:
    source = open_input(path := write(tmp_path, content))
    with pytest.raises(InputError) as caught:
        list(source)
    assert str(caught.value).startswith(f"input {path} cannot be read, {message}")


def test_an_array_without_rows(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has no rows: give it at least one"):
        open_input(write(tmp_path, "[ ]"))


def test_a_damaged_element_is_not_followed_to_the_end_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_array, "_PIECE_CHARACTERS", 64)
    monkeypatch.setattr(json_array, "_MAX_ELEMENT_CHARACTERS", 1000)
    path = write(tmp_path, '[{"a": 1},\n{"b" "c"},\n' + '{"a": "some text"},\n' * 10_000)
    counts: list[int] = []
    read = json_array._Text._read

    def counting_read(self: json_array._Text, num_characters: int) -> None:
        counts.append(num_characters)
        read(self, num_characters)

    monkeypatch.setattr(json_array._Text, "_read", counting_read)
    with pytest.raises(InputError, match="line 2: not valid JSON: Expecting ':' delimiter"):
        list(open_input(path))
    assert sum(counts) < 10_000


def test_one_beside_files_of_another_format_describes_them(tmp_path: Path) -> None:
    write(tmp_path, '{"license": "MIT"}', "metadata.json")
    write(tmp_path, '{"a": 1}\n', "b.jsonl")
    assert [row.values for row in open_input(tmp_path)] == [{"a": 1}]
    (tmp_path / "b.jsonl").unlink()
    write(tmp_path, '[{"a": 2}]', "b.json")
    assert [row.values for row in open_input(tmp_path)] == [{"a": 2}, {"license": "MIT"}]
