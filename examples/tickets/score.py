"""Scores a labelled data set of tickets: rows, accuracy and a table per label.

python examples/tickets/score.py out/tickets --rows 2000

Exits with code 1 and one line when a row is missing or there twice, or when the accuracy is below --min-accuracy.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

COLUMNS = ["row", "category", "label", "confidence"]


class ScoreError(Exception):
    """The data set is not complete or not good enough; the message is one line."""


class Answer(NamedTuple):
    """One row of the data set; label and confidence are None where the row failed."""

    row: int
    category: str
    label: str | None
    confidence: float | None


def read_answers(folder: Path) -> list[Answer]:
    """All rows of the folder's part files; raises ScoreError when there are none or a column is missing."""
    paths = sorted(folder.glob("part-*.parquet"))
    if not paths:
        raise ScoreError(f"no part-*.parquet in {folder}")
    tables = []
    for path in paths:
        missing = set(COLUMNS) - set(pq.read_schema(path).names)
        if missing:
            raise ScoreError(f"{path} has no column {', '.join(sorted(missing))}")
        tables.append(pq.read_table(path, columns=COLUMNS))
    return [Answer(**record) for record in pa.concat_tables(tables, promote_options="permissive").to_pylist()]


def check_rows(answers: Sequence[Answer], expected: int | None) -> None:
    """Raises ScoreError unless the rows are 0 to n - 1, each once; n is `expected`, or one more than the last row."""
    counts = Counter(answer.row for answer in answers)
    twice = sorted(row for row, count in counts.items() if count > 1)
    if twice:
        raise ScoreError(f"{len(twice)} rows are there more than once, the first is row {twice[0]}")
    rows = expected if expected is not None else max(counts, default=-1) + 1
    missing = [row for row in range(rows) if row not in counts]
    if missing:
        raise ScoreError(f"{len(missing)} of {rows} rows are missing, the first is row {missing[0]}")
    if len(counts) > rows:
        raise ScoreError(f"{len(counts)} rows are there, {rows} were expected")


def accuracy(answers: Sequence[Answer]) -> float:
    return sum(answer.label == answer.category for answer in answers) / len(answers)


def label_table(answers: Sequence[Answer]) -> list[str]:
    """A line per label: how often it was given, how often rightly, and the mean confidence."""
    by_label = defaultdict(list)
    for answer in answers:
        by_label[answer.label or "(failed)"].append(answer)
    lines = [f"{'label':<12}{'rows':>7}{'correct':>10}{'confidence':>12}"]
    for label, given in sorted(by_label.items()):
        known = [answer.confidence for answer in given if answer.confidence is not None]
        mean = f"{sum(known) / len(known):.3f}" if known else "-"
        lines.append(f"{label:<12}{len(given):>7}{accuracy(given):>10.1%}{mean:>12}")
    return lines


def report(folder: Path, expected: int | None, min_accuracy: float) -> None:
    """Prints the score; raises ScoreError when the data set fails it."""
    answers = read_answers(folder)
    check_rows(answers, expected)
    reached = accuracy(answers)
    print(f"{len(answers)} rows, accuracy {reached:.2%}")
    print("\n".join(label_table(answers)))
    if reached < min_accuracy:
        raise ScoreError(f"accuracy {reached:.2%} is below {min_accuracy:.2%}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Score a labelled data set of tickets.")
    parser.add_argument("folder", type=Path, help="folder with part-*.parquet files")
    parser.add_argument("--rows", type=int, help="number of rows there must be (default: up to the highest row)")
    parser.add_argument("--min-accuracy", type=float, default=0.95, help="exit with code 1 below this (default 0.95)")
    options = parser.parse_args(arguments)
    try:
        report(options.folder, options.rows, options.min_accuracy)
    except ScoreError as error:
        print(f"score: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
