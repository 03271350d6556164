"""What is shown of a large input while it is read."""

import threading

import pytest

from headrace.jobs.cli import reading
from headrace.jobs.cli.reading import shown_reading
from headrace.storage.readers import open_input

from ..conftest import wait_until


@pytest.mark.parametrize(("is_terminal", "shown"), [("1", "\rreading: 3 rows"), ("0", "reading: 3 rows\n")])
def test_the_rows_that_are_read_are_counted_meanwhile(monkeypatch, capsys, tmp_path, is_terminal, shown):
    monkeypatch.setenv("TTY_COMPATIBLE", is_terminal)
    monkeypatch.setenv("TERM", "xterm")
    for name in ("_FIRST_SECONDS", "_REDRAWN_SECONDS", "_PLAIN_LINE_SECONDS"):
        monkeypatch.setattr(reading, name, 0.01)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 5)
    source = open_input(tmp_path / "rows.jsonl")
    told = ""

    def has_told() -> bool:
        nonlocal told
        told += capsys.readouterr().err
        return shown in told

    with shown_reading(source):
        rows = iter(source)
        for _ in range(3):
            next(rows)
        wait_until(has_told, "it says how many rows were read", 10)
        assert source.num_read == 3


def test_nothing_is_shown_of_what_is_read_at_once(capsys, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    source = open_input(tmp_path / "rows.jsonl", limit=1)
    with shown_reading(source):
        assert len(list(source)) == source.num_read == 1
    assert capsys.readouterr().err == ""


def test_it_ends_with_what_goes_wrong(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(reading, "_FIRST_SECONDS", 0.0)
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match="wrong"), shown_reading(open_input(tmp_path / "rows.jsonl")):
        raise ValueError("wrong")
    assert not any(thread.name == "reading" for thread in threading.enumerate())
