"""What a job costs by the price of an hour: arithmetic on what was measured, and nothing without a price."""

import re

import pytest

from headrace.jobs.cli.cost import cost

from ..running import MODEL, assert_refused, label_arguments, write_lines


def test_each_kind_of_token_bears_the_whole_price():
    assert cost(2.5, 3600, 4_000_000, 500_000) == "2.5, 0.625 a million prompt tokens, 5 a million completion tokens"
    assert cost(0.0036, 70, 1_000_000_000, 0) == "0.00007, 0.00000007 a million prompt tokens"
    assert cost(36, 1, 1000, 0) == "0.01, 10.00 a million prompt tokens"
    assert cost(3600, 2000, 1, 1).startswith("2,000.00, 2,000,000,000.00 a million prompt tokens")


def test_runs_shows_and_dry_runs_say_it_where_a_price_is_given(served, headrace, few, tmp_path):
    price = ("--gpu-hour-price", "3600")
    run = headrace(served, *label_arguments(few, tmp_path / "out"), *price)
    job = run.out.split()[1]
    shown = headrace(served, "show", job, *price).out
    rehearsed = headrace(served, "dry-run", few, "--model", MODEL, "--prompt", "{text}", *price).out
    for said in (run.out, shown, rehearsed):
        (line,) = [line for line in said.splitlines() if line.startswith("cost ")]
        numbers = r"[\d,.]+"
        assert re.search(f"{numbers}, {numbers} a million prompt tokens, {numbers} a million completion tokens$", line)
    # An hour's price in seconds: what it costs is how long it took.
    (line,) = [line for line in run.out.splitlines() if line.startswith("cost ")]
    (seconds,) = re.findall(r"of which ([\d.]+) s with", run.out)
    assert float(line.split()[1].rstrip(",")) == pytest.approx(float(seconds), abs=0.06)
    assert "cost" not in headrace(served, "show", job).out


@pytest.mark.parametrize("price", ["0", "-1", "nan", "inf"])
def test_what_is_no_price_is_refused(served, headrace, tmp_path, price):
    rows = write_lines(tmp_path / "in.jsonl", {"text": "x"})
    command = ("dry-run", rows, "--model", MODEL, "--prompt", "{text}", "--gpu-hour-price", price)
    assert_refused(headrace(served, *command), "--gpu-hour-price must be above 0")
