"""A real worker is killed in the middle of long rows: what was saved of them is not generated again."""

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from headrace.engine.request import Request
from headrace.engine.sampling_params import SamplingParams
from headrace.jobs.client.client import Client, Job
from headrace.jobs.shards.begun import bytes_of_token
from headrace.jobs.shards.checkpoints import MIN_TOKENS
from headrace.jobs.streams.keys import tokens_key
from headrace.storage.ledger.records import JobState, shard_id_of

from ...engine.fakes import fake_answer
from ..conftest import wait_until
from ..models import WORDS, write_model_folder
from .forked import client_of_workers

SECONDS = 120.0
CONTEXT, ANSWER_TOKENS, TOP = 512, 300, 2
PROMPTS = ((1, 2), (3, 5), (4, 6))
SETTINGS = {
    "HEADRACE_TEST_CONTEXT": str(CONTEXT),
    "HEADRACE_TEST_SHOWN_TOKENS": str(CONTEXT),
    # So long that no worker loses one that only stood still: its rows would be begun once more.
    "HEADRACE_LEASE_SECONDS": "60",
    # Enough to be saved once, and not a second time.
    "HEADRACE_TEST_HOLD_TOKENS": str(3 * MIN_TOKENS // 2),
}


@pytest.fixture
def model(tmp_path) -> Path:
    return write_model_folder(tmp_path / "model", max_position_embeddings=CONTEXT)


@pytest.fixture
def client(tmp_path, model) -> Iterator[Client]:
    with client_of_workers(model, tmp_path, HEADRACE_TEST_HOLD=str(tmp_path / "hold"), **SETTINGS) as client:
        yield client


def saved(redis: Redis, job: Job, num_top: int | None) -> list[int]:
    """How many tokens of each row Redis has."""
    kept = redis.hgetall(tokens_key(shard_id_of(job.id, 0)))
    suffix = "" if num_top is None else f"#{num_top}"
    return [len(kept.get(f"{row}{suffix}".encode(), b"")) // bytes_of_token(num_top) for row in range(len(PROMPTS))]


def begun(log: Path) -> list[list[int]]:
    """What the workers have computed at a time when they began with a row: its prompt, and what was there of it."""
    lines = (line.split() for line in log.read_text().splitlines())
    return [list(map(int, words)) for words in lines if words and all(word.isdecimal() for word in words)]


def submitted(client: Client, model: Path, output: Path, **options: Any) -> Job:
    rows = [{"text": " ".join(WORDS[token] for token in prompt)} for prompt in PROMPTS]
    return client.submit(rows, model, output, prompt="{text}", max_tokens=ANSWER_TOKENS, ignore_eos=True, **options)


def finished_by_another(client: Client, job: Job, num_top: int | None, folder: Path) -> list[int]:
    """Kill its worker in mid answer; returns how many tokens of each row were saved."""
    with Redis.from_url(client.redis_url) as redis:
        wait_until(lambda: min(saved(redis, job, num_top)) > 0, "something of all rows is saved", SECONDS)
        num_saved = saved(redis, job, num_top)
    os.kill(int((folder / "pids").read_text().split()[-1]), signal.SIGKILL)
    (folder / "hold").unlink()
    # Nobody waits until its lease has run out.
    (killed,) = client.ledger.attempts(shard_id_of(job.id, 0))
    client.ledger.leases.renew(killed.owner, [killed.id], 0.0)
    assert job.wait(SECONDS, start_worker=False).state is JobState.COMPLETED
    return num_saved


def test_saved_tokens_are_not_generated_again(client, model, tmp_path):
    jobs, num_saved = [], []
    for name, num_top in (("plain", None), ("probable", TOP)):
        (tmp_path / "hold").touch()
        options = {} if num_top is None else {"logprobs": True, "top_logprobs": num_top}
        jobs.append(submitted(client, model, tmp_path / name, **options))
        num_saved.append(finished_by_another(client, jobs[-1], num_top, tmp_path))
    for row, prompt in enumerate(PROMPTS):
        tokens = answer(prompt)
        began = [found for found in begun(tmp_path / "log") if found[:2] == list(prompt)]
        again = [[*prompt, *tokens[: saved_of_job[row]]] for saved_of_job in num_saved]
        assert sorted(began) == sorted([list(prompt), list(prompt), *again])
        for job in jobs:
            stored = job.results().to_pylist()[row]
            assert stored["output"].split() == [WORDS[token] for token in tokens if token]
        assert [each["token_id"] for each in stored["logprobs"]] == tokens
        assert {len(each["top"]) for each in stored["logprobs"]} == {TOP}
        assert all(len(prompt) < len(each) < ANSWER_TOKENS for each in again)


def answer(prompt: Sequence[int]) -> list[int]:
    """What a row's tokens are when nothing happens."""
    params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True, temperature=0.0)
    return fake_answer(Request("r", list(prompt), params), CONTEXT)
