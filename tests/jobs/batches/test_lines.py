"""What is found in input files before anything is run, whatever their size."""

import codecs
import json

import pytest

from headrace.jobs.batches import lines as module
from headrace.jobs.batches.lines import CHAT, LineFault, check_lines, lines_of
from headrace.storage.readers import json_lines


def line(custom_id, **changes):
    good = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {"model": "m"}}
    return json.dumps(good | changes).encode()


def expect_served(model):
    if model not in ("m", "other"):
        raise LineFault("model_not_found", "It is not served.", "body.model")


@pytest.fixture
def check(tmp_path):
    def run(*texts, on_line=lambda: None):
        path = tmp_path / "input"
        path.write_bytes(b"\n".join(texts))
        return check_lines(path, CHAT, expect_served, tmp_path / "sort", on_line)

    return run


def test_lines_are_counted_as_an_editor_does(tmp_path):
    path = tmp_path / "input"
    path.write_bytes(codecs.BOM_UTF8 + b"a\r\n\n  \nb\nc")
    assert list(lines_of(path)) == [(1, b"a\r\n"), (4, b"b\n"), (5, b"c")]


def test_a_line_too_long_is_one_fault(check, monkeypatch):
    for each in (module, json_lines):
        monkeypatch.setattr(each, "MAX_LINE_BYTES", 200)
    found = check(line("a"), line("b", body={"model": "m", "x": "y" * 1000}), line("c"))
    assert [(error.line, error.code) for error in found.errors] == [(2, "invalid_json_line")]
    assert "longer than" in found.errors[0].message
    assert found.num_lines == 3


def test_a_custom_id_that_no_database_takes(check):
    found = check(line("a\0b"), line("c"))
    assert [(error.line, error.code, error.param) for error in found.errors] == [(1, "invalid_value", "custom_id")]


def test_custom_ids_beyond_memory_are_compared(check, monkeypatch):
    monkeypatch.setattr(module, "_SORT_MEMORY_BYTES", 2000)
    texts = [line(f"row-{number}") for number in range(200)]
    found = check(*texts, line("row-7"), line("row-7"), line("row-150"))
    assert [(error.line, error.code) for error in found.errors] == [
        (201, "duplicate_custom_id"),
        (202, "duplicate_custom_id"),
        (203, "duplicate_custom_id"),
    ]
    assert [error.message[-9:] for error in found.errors] == ["f line 8.", "f line 8.", "line 151."]


def test_of_many_errors_the_first_are_told(check, monkeypatch):
    monkeypatch.setattr(module, "_MAX_ERRORS", 3)
    found = check(*[b"{"] * 5, line("a"), line("a"), line("a"))
    assert [error.line for error in found.errors] == [1, 2, 3, None]
    assert found.errors[-1].code == "too_many_errors"
    assert "4 more" in found.errors[-1].message


def test_the_model_of_the_first_line_is_that_of_all(check):
    found = check(line("a", body={"model": "m"}), line("b", body={"model": "other"}))
    assert [(error.line, error.code) for error in found.errors] == [(2, "mismatched_model")]
    assert check(line("a"), line("b")).model == "m"


@pytest.mark.parametrize("custom_id", ["", "x" * 513, 7, ["a"]])
def test_a_custom_id_is_a_short_text(check, custom_id):
    (error,) = check(line(custom_id)).errors
    assert error.param == "custom_id"


def test_whoever_reads_may_be_stopped(check):
    class Stop(Exception):
        pass

    def stop():
        raise Stop

    with pytest.raises(Stop):
        check(line("a"), on_line=stop)
