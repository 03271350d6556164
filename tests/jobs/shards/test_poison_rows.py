"""Rows that kill the worker: a real one, which a certain token makes kill itself."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from headrace.engine.request import Request
from headrace.jobs.client.client import Client
from headrace.storage.ledger.records import JobState

from ...engine.fakes import CONTEXT, fake_answer
from ..forked_worker import KILLER
from ..models import WORDS, write_model_folder
from .forked import client_of_workers

# A worker starts nine times.
SECONDS = 240.0
ROWS, SHARD_ROWS = 40, 20


@pytest.fixture
def model(tmp_path) -> Path:
    return write_model_folder(tmp_path / "model")


@pytest.fixture
def client(tmp_path, model) -> Iterator[Client]:
    settings = {"HEADRACE_SHARD_ROWS": str(SHARD_ROWS), "HEADRACE_TEST_HURRY": "yes"}
    with client_of_workers(model, tmp_path, **settings) as client:
        yield client


def prompts(poisoned: set[int]) -> list[list[int]]:
    generator = Random(5)
    return [
        [KILLER if row in poisoned else generator.randrange(1, KILLER), *generator.choices(range(1, 11), k=4)]
        for row in range(ROWS)
    ]


def test_rows_that_kill_their_worker_are_found_and_their_neighbours_finish(client, model, tmp_path):
    poisoned = {0, 7}
    asked = prompts(poisoned)
    rows = [{"text": " ".join(WORDS[token] for token in prompt)} for prompt in asked]
    job = client.submit(rows, model, tmp_path / "out", prompt="{text}", max_tokens=6)
    assert job.wait(SECONDS, start_worker=False).state is JobState.COMPLETED
    table = job.results()
    assert table["row"].to_pylist() == list(range(ROWS))
    for row, (output, error) in enumerate(zip(table["output"].to_pylist(), table["error"].to_pylist(), strict=True)):
        if row in poisoned:
            assert error.startswith("worker_crashed: ")
        else:
            assert (output, error) == (expected(asked[row], job.spec.sampling.params(None)), None)
    num_workers = len((tmp_path / "pids").read_text().split())
    # Two crashes of all rows together; then each culprit's sixteenth of its shard, and twice the culprit alone.
    assert num_workers <= 1 + 2 + 3 * len(poisoned)


def expected(prompt, params) -> str:
    answer = fake_answer(Request("r", prompt, params), CONTEXT)
    return " ".join(WORDS[token] for token in answer if token != 0)
