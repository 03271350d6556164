"""The Python face, with a worker that serves the tickets model."""

import json
import math
import os
import re
from dataclasses import replace
from datetime import date
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds
import pytest
from pydantic import BaseModel, Field
from redis import Redis
from sqlalchemy import update

from headrace import Client
from headrace.engine.errors import ConfigError, ModelError
from headrace.jobs.client import display
from headrace.jobs.client import job as job_module
from headrace.jobs.client.client import Job, JobTimeoutError
from headrace.jobs.errors import JobMismatchError, SpecError
from headrace.jobs.outside.webhooks import optional_webhook
from headrace.jobs.planning.producer import new_job_id
from headrace.jobs.settings import SettingsError
from headrace.jobs.workers.presence import WorkerId, WorkerPresence
from headrace.storage.errors import InputError, OutputNotEmpty, PartMissing, SinkError, StorageError, UnknownJob
from headrace.storage.ledger.ledger import Ledger
from headrace.storage.ledger.records import JobState, ShardRecord, WebhookState
from headrace.storage.ledger.tables import jobs
from headrace.storage.output.local_folder import LocalFolder
from headrace.storage.output.manifest import Manifest, write_manifest

from ..full_disk import full_disk
from ..running import LABELS, MODEL

SECONDS = 120.0
# So hot that every token is as likely as the one that ends: a few rows are short, most take their thousand tokens.
SLOW: dict[str, Any] = {"prompt": "{text}", "max_tokens": 1000, "temperature": 10_000}
FAST: dict[str, Any] = {"prompt": "{text}", "choices": LABELS}


@pytest.fixture(scope="module")
def rows(tickets) -> list[dict[str, str]]:
    with tickets.open() as file:
        return [json.loads(line) for line in islice(file, 80)]


def finish(job: Job) -> list[dict[str, Any]]:
    """The rows of a job run to its end by the worker that is there."""
    progress = job.wait(SECONDS, start_worker=False)
    assert progress.state is JobState.COMPLETED
    table = job.results()
    assert table.num_rows == progress.rows_done == progress.rows_total
    found: list[dict[str, Any]] = table.to_pylist()
    return found


def folder_rows(folder: Path) -> list[int]:
    found: list[int] = ds.dataset(sorted(map(str, folder.glob("*.parquet")))).to_table()["row"].to_pylist()
    return sorted(found)


def test_rows_come_back_in_their_order_with_their_answers(client, rows, tmp_path):
    answers = finish(client.submit(rows, MODEL, tmp_path / "out", **FAST))
    assert [{name: answer[name] for name in rows[0]} for answer in answers] == rows
    assert [answer["row"] for answer in answers] == list(range(80))
    assert {answer["label"] for answer in answers} <= set(LABELS)
    assert {answer["error"] for answer in answers} == {None}


def test_a_file_gives_what_its_rows_give(client, tickets, rows, tmp_path):
    of_file = finish(client.submit(tickets, str(MODEL), str(tmp_path / "file"), limit=80, **FAST))
    of_rows = finish(client.submit(iter(rows), MODEL, tmp_path / "rows", **FAST))
    assert [row["label"] for row in of_file] == [row["label"] for row in of_rows]


def test_what_json_cannot_hold_becomes_text_or_that_rows_error(client, rows, tmp_path):
    odd = [rows[0] | {"when": date(2026, 3, 4)}, {"text": "half a pair: \ud800"}]
    answers = finish(client.submit(odd, MODEL, tmp_path / "out", **FAST))
    assert answers[0]["when"] == "2026-03-04"
    assert "surrogate" in answers[1]["error"]


def test_a_number_that_pandas_lacks_is_null(client, rows, tmp_path):
    frame = pd.DataFrame([rows[0] | {"price": 2.5}, rows[1], rows[2] | {"prices": [1.0, math.nan]}])
    answers = finish(client.submit(frame.to_dict("records"), MODEL, tmp_path / "out", **FAST))
    assert [row["error"] for row in answers] == [None] * 3
    assert [row["price"] for row in answers] == [2.5, None, None]
    assert json.loads(answers[2]["prices"]) == [1.0, None]


def test_what_pandas_lacks_of_other_types_is_null(client, rows, tmp_path):
    frame = pd.DataFrame([rows[0] | {"when": "2026-03-04", "count": 1}, rows[1]])
    frame = frame.assign(when=pd.to_datetime(frame["when"]), count=frame["count"].astype("Int64"))
    answers = finish(client.submit(frame.to_dict("records"), MODEL, tmp_path / "out", **FAST))
    assert [(row["when"], row["count"]) for row in answers] == [("2026-03-04 00:00:00", 1), (None, None)]


def test_what_numpy_has_is_as_python_has_it(client, rows, tmp_path):
    """pandas reads lists of Parquet as arrays."""
    given = rows[0] | {
        "count": np.int64(3),
        "is_open": np.bool_(True),
        "price": np.float32("nan"),
        "tags": np.array(["a", "b"], dtype=object),
        "grid": np.array([[1.5, math.nan]]),
        "day": np.datetime64("2026-03-04T00:00:00.000000001"),
    }
    [answer] = finish(client.submit([given], MODEL, tmp_path / "out", **FAST))
    assert (answer["count"], answer["is_open"], answer["price"]) == (3, True, None)
    assert (json.loads(answer["tags"]), json.loads(answer["grid"])) == (["a", "b"], [[1.5, None]])
    assert answer["day"] == "2026-03-04T00:00:00.000000001"


def test_a_frame_keeps_its_columns_and_its_job_is_resumed(client, unserved, rows, tmp_path):
    frame = pd.DataFrame(rows[:3]).assign(at=pd.to_datetime("2026-03-04"), seen=[1, None, 3], label="mine")
    frame.loc[1, "text"] = float("nan")
    answers = finish(client.submit(frame, MODEL, tmp_path / "out", **FAST))
    assert [row["at"] for row in answers] == [*frame["at"]]
    assert [(row["seen"], row["input_label"]) for row in answers] == [(1, "mine"), (None, "mine"), (3, "mine")]
    assert [row["error"] is None for row in answers] == [True, False, True]
    job = unserved.submit(frame, MODEL, tmp_path / "again", **FAST)
    assert unserved.submit(pa.Table.from_pandas(frame), MODEL, tmp_path / "again", **FAST, mode="resume").id == job.id
    with pytest.raises(JobMismatchError, match="another input"):
        unserved.submit(frame[:2], MODEL, tmp_path / "again", **FAST, mode="resume")
    assert not [*unserved.settings.inputs_folder.iterdir()]


class Found(BaseModel):
    kind: Literal["billing", "shipping"]
    sure: bool
    other: list[bool] = Field(max_length=2)


def test_answers_that_follow_a_schema_are_values_too(client, rows, tmp_path):
    asked = {"structured_outputs": {"json": Found, "disable_any_whitespace": True}, "prompt": "{text}"}
    given = [*rows[:5], {"text": ""}]
    answers = finish(client.submit(given, MODEL, tmp_path / "out", max_tokens=40, **asked))
    for row in answers[:5]:
        assert row["parsed"] == json.loads(row["output"]) == Found.model_validate(row["parsed"]).model_dump()
    assert answers[5]["error"]
    assert answers[5]["parsed"] is None
    cut = finish(client.submit(given[:1], MODEL, tmp_path / "cut", max_tokens=2, **asked))
    assert (cut[0]["finish_reason"], cut[0]["parsed"]) == ("length", None)


def test_a_job_is_found_again(client, rows, tmp_path):
    job = client.submit(rows[:3], MODEL, tmp_path / "out", **FAST)
    finish(job)
    assert client.jobs(1)[0].id == job.id
    again = client.job(job.id)
    assert again.spec == job.spec
    assert again.results().equals(job.results())
    with pytest.raises(UnknownJob, match="job_x"):
        client.job("job_x")


def test_a_job_is_shown_in_one_line_and_no_password_or_secret_with_it(client, rows, tmp_path):
    job = client.submit(rows[:3], MODEL, tmp_path / "out", **FAST)
    assert repr(job) == f"Job(id={job.id!r}, output='{tmp_path / 'out'}')"
    assert "secret" not in repr(replace(job.record, sink={"url": "postgresql://me:secret@host/name"}))
    assert "secret" not in repr(optional_webhook("https://example.com/hook", "secret"))
    finish(job)


def test_a_job_is_served_by_workers_of_its_own_ledger(client, unserved, tmp_path):
    """Others' listen to the same queue where several ledgers share a Redis."""
    with WorkerPresence(client.redis_url) as presence:
        serving = {worker.queue: WorkerId.parse(worker.name) for worker in presence.workers()}
    assert all(worker.answers_jobs_of(client.ledger.identity) for worker in serving.values())
    assert not any(worker.answers_jobs_of(unserved.ledger.identity) for worker in serving.values())
    job = unserved.submit([{"text": "late"}], MODEL, tmp_path / "out", prompt="{text}")
    with WorkerPresence(unserved.redis_url) as presence:
        presence.announce(job.record.queue, WorkerId.own(client.ledger.identity))
        assert not job.is_served
        presence.announce(job.record.queue, WorkerId.own(unserved.ledger.identity))
        assert job.is_served


def test_a_small_job_is_cut_for_the_workers_there_are_and_will_be(unserved, tmp_path):
    settings = unserved.settings.model_copy(update={"shard_rows": None})

    def cut(num_workers: int, name: str) -> tuple[str, list[int]]:
        with Client(settings, [{}] * num_workers) as client:
            job = client.submit(
                [{"text": str(number)} for number in range(400)], MODEL, tmp_path / name, prompt="{text}"
            )
            return job.record.queue, [shard.num_rows for shard in client.ledger.shards(job.id)]

    queue, sizes = cut(1, "one will be")
    assert sizes == [256, 144]
    with WorkerPresence(unserved.redis_url) as presence:
        own = WorkerId.own(unserved.ledger.identity)
        for pid in (own.pid, os.getppid()):
            presence.announce(queue, replace(own, pid=pid))
    assert cut(1, "two are there") == (queue, [50] * 8)
    assert cut(3, "three will be") == (queue, [34] * 11 + [26])


@pytest.mark.parametrize(
    ("change", "error", "problem"),
    [
        ({"prompt": "{txet}"}, SpecError, "^prompt names the column 'txet'"),
        ({"prompt": None}, SpecError, ': pass prompt="{ticket_id}"$'),
        ({"temperature": -1}, SpecError, "temperature"),
        ({"temprature": 1}, SpecError, "^temprature: there is no such option: did you mean temperature\\?$"),
        ({"within": "24h"}, SpecError, r"^within: there is no such option: did you mean within_seconds\?$"),
        ({"sampling": {"n": 1}}, SpecError, "^sampling: there is no such option$"),
        ({"choices": ("a", "a")}, SpecError, "choices"),
        ({"choices": "shipping"}, SpecError, "^choices: must be a list of texts, not 'shipping'$"),
        ({"vote": True}, SpecError, "vote: needs several .* a temperature above 0$"),
        ({"dtype": "fp4"}, ConfigError, "^dtype must be one of auto, float32, bfloat16, float16, not 'fp4'$"),
        ({"mode": "append"}, SpecError, "^mode must be one of new, resume, overwrite, not 'append'$"),
        ({"priority": "high"}, SpecError, "^priority must be a whole number from -1000 to 1000, not 'high'$"),
        ({"priority": 1001}, SpecError, "^priority must be a whole number"),
        ({"within_seconds": "1h"}, SpecError, "^within_seconds must be a number above 0, .* not '1h'$"),
        ({"within_seconds": 0}, SpecError, r"^within_seconds .* and at most 31622400 \(366 days\), not 0$"),
        ({"within_seconds": True}, SpecError, "^within_seconds must be a number above 0, .* not True$"),
        ({"within_seconds": 10**30}, SpecError, "^within_seconds must be a number above 0"),
        ({"priority": True}, SpecError, "^priority must be a whole number from -1000 to 1000, not True$"),
        ({"limit": True}, SpecError, "^limit: Input should be a number, not true$"),
        ({"limit": 10**30}, SpecError, r"^limit: Input should be below 2\*\*64"),
        ({"temperature": True}, SpecError, "^temperature: Input should be a number, not true$"),
        ({"max_tokens": np.True_}, SpecError, "^max_tokens: Input should be a number, not true$"),
        ({"idempotency_key": "\ud800"}, SpecError, "^idempotency_key is not valid UTF-8$"),
        ({"idempotency_key": 5}, SpecError, "^idempotency_key must be a text, not 5$"),
        ({"webhook": 5}, SpecError, "^webhook must be a text, not 5$"),
        ({"webhook": "https://example.com", "webhook_secret": 5}, SpecError, "^webhook_secret must be a text, not 5$"),
        ({"webhook_secret": "s"}, SpecError, "^webhook_secret signs what is sent to webhook: give both, or neither$"),
        ({"model": None}, ModelError, "^model must be a folder, a GGUF file or a Hugging Face id, not None$"),
        ({"model": b"x"}, ModelError, "^model must be a folder"),
        ({"model": "org/name", "revision": 5}, ModelError, "^revision must be a text, not 5$"),
        ({"output": None}, StorageError, "^output must be a path or a URL, not of the type NoneType$"),
        ({"output": "a\0b"}, StorageError, r"^output 'a\\x00b' has a NUL: no path has one$"),
        ({"output": "\ud800"}, StorageError, r"^output '\\ud800' is not valid UTF-8: rename it$"),
        ({"lora_request": "kind"}, SpecError, "lora_request must be a headrace.LoRARequest, not 'kind'"),
        ({"input": "nowhere.jsonl"}, InputError, "does not exist"),
        ({"input": []}, InputError, "^input of rows has no rows: give it at least one$"),
        ({"input": None}, InputError, "^the input is of the type NoneType: give a path, a URL, a DataFrame or"),
        ({"input": {"text": ["a"]}}, InputError, "^the input is of the type dict: give a path, a URL, a DataFrame or"),
        ({"input": pd.DataFrame({"text": []})}, InputError, "^input of rows has no rows: give it at least one$"),
        ({"input": pd.Series(["a"])}, InputError, "^input of rows is a column"),
        (
            {"input": ["late"]},
            InputError,
            "^row 0 of the input is of the type str: give .* or rows as mappings such as",
        ),
        ({"sink": "mysql://host/name"}, SinkError, "^sink cannot be mysql"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused_and_leaves_nothing(client, rows, tmp_path, change, error, problem):
    arguments: dict[str, Any] = {"input": rows, "model": MODEL, "output": tmp_path / "out", **FAST}
    with pytest.raises(error, match=problem) as refusal:
        client.submit(**arguments | change)
    assert "\n" not in str(refusal.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["prompt", "mode", "webhook", "lora_request", "top_k", "max_tokens", "within_seconds"])
def test_numbers_that_python_does_not_write_out(unserved, rows, tmp_path, name):
    with pytest.raises(SpecError, match=rf"^{name}\b.*(not a number of thousands of digits|below 2\*\*64)$"):
        unserved.submit(rows, MODEL, tmp_path / "out", **{"prompt": "{text}", name: 10**5000})


def test_numbers_may_be_numpys(unserved, rows, tmp_path):
    numbers = {"limit": np.int64(3), "priority": np.int64(2), "within_seconds": np.float32(60), "seed": np.int64(7)}
    more = {"temperature": np.float32(0.5), "max_tokens": np.int32(9)}
    job = unserved.submit(rows, np.str_(MODEL), tmp_path / "out", prompt="{text}", **numbers, **more)
    assert (job.record.num_rows, job.record.priority) == (3, 2)
    assert job.record.spec["sampling"]["max_tokens"] == 9


def test_a_limit_may_be_written_as_a_text_as_over_http(unserved, rows, tmp_path):
    assert unserved.submit(rows, MODEL, tmp_path / "out", **FAST, limit="5").record.num_rows == 5


@pytest.mark.parametrize("settings", [5, {"data_dir": "/x"}])
def test_settings_that_are_none(settings):
    with pytest.raises(SettingsError, match=r"^settings must be a headrace\.jobs\.settings\.Settings, not "):
        Client(settings)


def test_submitting_again_needs_a_mode(client, rows, tmp_path):
    first = client.submit(rows, MODEL, tmp_path, **FAST)
    with pytest.raises(OutputNotEmpty, match='pass mode="resume" to finish it or mode="overwrite" to replace it'):
        client.submit(rows, MODEL, tmp_path, **FAST)
    again = client.submit(rows, MODEL, tmp_path, mode="resume", **FAST)
    assert again.id == first.id
    finish(again)
    once_more = client.submit(rows, MODEL, tmp_path, mode="resume", **FAST)
    assert once_more.id == first.id
    assert once_more.progress().rows_done == 80
    assert folder_rows(tmp_path) == list(range(80))


def test_a_job_that_ends_while_it_is_taken_up_again_is_that_job(unserved, rows, tmp_path, monkeypatch):
    first = unserved.submit(rows, MODEL, tmp_path / "out", **FAST)
    shards = Ledger.shards

    def end_meanwhile(ledger: Ledger, job_id: str) -> list[ShardRecord]:
        ledger.cancel_job(job_id)
        return shards(ledger, job_id)

    monkeypatch.setattr(Ledger, "shards", end_meanwhile)
    again = unserved.submit(rows, MODEL, tmp_path / "out", mode="resume", **FAST)
    assert (again.id, again.progress().state) == (first.id, JobState.CANCELLED)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"prompt": "Ticket: {text}"}, "another prompt"),
        ({"choices": LABELS[::-1]}, "another choices"),
        ({"system": "Be kind."}, "another system"),
        ({"temperature": 0.5, "seed": 3}, "another temperature, seed"),
        ({"limit": 3}, 'another limit: .* pass mode="overwrite"; with cache a job takes the answers of earlier ones'),
        ({"input": [{"text": "other"}]}, "another input"),
    ],
    ids=str,
)
def test_resuming_another_job_names_what_differs(unserved, rows, tmp_path, change, named):
    arguments: dict[str, Any] = {"input": rows, "model": MODEL, "output": tmp_path / "out", **FAST}
    unserved.submit(**arguments)
    with pytest.raises(JobMismatchError, match=named):
        unserved.submit(**arguments | change, mode="resume")


def test_what_a_job_of_before_could_not_say_is_no_difference(unserved, rows, tmp_path):
    job = unserved.submit(rows, MODEL, tmp_path / "out", **FAST)
    added = ("cache", "vote", "chat_template_kwargs", "lora", "schema_version")
    old = {name: value for name, value in job.record.spec.items() if name not in added}
    with unserved.ledger.database.write() as connection:
        connection.execute(update(jobs).where(jobs.c.id == job.id).values(spec=old))
    with pytest.raises(JobMismatchError, match="belongs to a job with another input:"):
        unserved.submit(rows[:3], MODEL, tmp_path / "out", mode="resume", **FAST)


def test_a_job_that_is_overwritten_is_cancelled_and_writes_no_more(client, rows, tmp_path, wait_until):
    # So many that it is far from done, however long we are kept from our turn.
    old = client.submit(rows * 20, MODEL, tmp_path, **SLOW)
    wait_until(lambda: old.progress().rows_done > 0, "the old job has written something", SECONDS)
    new = client.submit(rows, MODEL, tmp_path, mode="overwrite", **FAST)
    assert new.id != old.id
    finish(new)
    assert old.progress().state is JobState.CANCELLED
    assert folder_rows(tmp_path) == list(range(80))
    assert not (client.settings.data_dir / "jobs" / old.id).exists()
    parts = {part.file_name for part in client.ledger.parts(new.id)}

    def is_tidy() -> bool:
        return {path.name for path in tmp_path.iterdir()} == parts | {"_headrace.json"}

    # The manifest is written once more after the end.
    wait_until(is_tidy, "nothing else is left")


def test_results_have_their_columns_before_there_is_a_row(unserved, rows, tmp_path):
    table = unserved.submit(rows, MODEL, tmp_path / "out", **FAST).results()
    assert (table.num_rows, table["label"].type, table["error"].type) == (0, pa.string(), pa.string())


def test_rows_that_were_removed_since_are_not_left_out_in_silence(client, rows, tmp_path):
    job = client.submit(rows[:3], MODEL, tmp_path / "out", **FAST)
    finish(job)
    finish(client.submit(rows[:3], MODEL, tmp_path / "out", mode="overwrite", **FAST))
    with pytest.raises(PartMissing, match=f"^part {tmp_path}/out/part-.* is gone: it was removed$"):
        job.results()


def test_a_cancelled_job_is_not_resumed(unserved, rows, tmp_path):
    job = unserved.submit(rows, MODEL, tmp_path / "out", **FAST)
    unserved.ledger.cancel_job(job.id)
    with pytest.raises(JobMismatchError, match='was cancelled: pass mode="overwrite"'):
        unserved.submit(rows, MODEL, tmp_path / "out", mode="resume", **FAST)


def test_a_job_killed_before_it_was_recorded_is_resumed_under_its_id(unserved, rows, tmp_path):
    job_id = new_job_id()
    job = unserved.submit(rows, MODEL, tmp_path / "first", **FAST)
    (tmp_path / "second").mkdir()
    write_manifest(LocalFolder(tmp_path / "second"), Manifest(job_id, job.record.fingerprint))
    again = unserved.submit(rows, MODEL, tmp_path / "second", mode="resume", **FAST)
    assert again.id == job_id
    assert again.progress().rows_total == 80


def test_a_jobs_end_can_be_told(unserved, rows, tmp_path):
    job = unserved.submit(rows, MODEL, tmp_path / "out", webhook="https://example.com/", webhook_secret="s", **FAST)
    webhooks = unserved.ledger.webhooks
    assert webhooks.of_job(job.id) == [(WebhookState.WAITING, None)]
    job.cancel()
    (told,) = webhooks.claim_due(10)
    assert (told.url, told.secret, told.event_type) == ("https://example.com/", "s", "job.cancelled")


def test_a_job_is_queued_though_redis_has_no_room_for_its_messages(unserved, rows, tmp_path, caplog, wait_until):
    """It is in the ledger, where workers' sweepers find what nobody rang for."""
    with Redis.from_url(unserved.redis_url) as redis:
        redis.config_set("maxmemory", 1)
        job = unserved.submit(rows, MODEL, tmp_path / "out", **FAST)
        job.pause()
        job.resume()
        redis.config_set("maxmemory", 0)
    assert [each.levelname for each in caplog.records if "Redis took no message" in each.message] == ["WARNING"] * 2
    assert job.progress().state is JobState.RUNNING


def test_a_job_says_that_it_waits_for_a_full_redis(unserved, rows, tmp_path):
    """No worker can say there that it is one."""
    job = unserved.submit(rows, MODEL, tmp_path / "out", **FAST)
    with Redis.from_url(unserved.redis_url) as redis:
        redis.config_set("maxmemory", 1)
        told = next(job.watch()).error
        redis.config_set("maxmemory", 0)
    assert told.startswith("Redis is full: make room in it, or raise its maxmemory (")
    assert next(job.watch()).error is None


@pytest.mark.parametrize(
    ("asked", "has_terminal", "is_shown"),
    [({}, False, False), ({}, True, True), ({"show_progress": False}, True, False)],
    ids=["a log", "a terminal", "off"],
)
def test_who_waits_at_a_terminal_sees_how_far_a_job_is(
    client, rows, tmp_path, monkeypatch, capsys, asked, has_terminal, is_shown
):
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(has_terminal)))
    monkeypatch.setenv("TERM", "xterm")
    job = client.submit(rows, MODEL, tmp_path / "out", **FAST)
    job.wait(SECONDS, start_worker=False, **asked)
    shown = capsys.readouterr().err
    # A fast worker may have ended it before the first look: then there is no rate.
    assert ("80/80" in shown) == is_shown == bool(shown)


def test_who_asks_for_it_sees_in_a_log_how_far_a_job_is(client, rows, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(display, "_PLAIN_LINE_SECONDS", -1.0)
    client.submit(rows, MODEL, tmp_path / "out", **FAST).wait(SECONDS, start_worker=False, show_progress=True)
    assert re.match(r"\d+/80 rows  \w", capsys.readouterr().err)


def test_waiting_has_an_end(unserved, rows, tmp_path):
    job = unserved.submit(rows, MODEL, tmp_path / "out", **FAST)
    with pytest.raises(JobTimeoutError, match=r"did not end in 0\.1 s"):
        job.wait(0.1, start_worker=False)
    assert job.results().num_rows == 0


def test_who_follows_a_job_waits_for_room_on_the_disk(unserved, rows, tmp_path, wait_until):
    job = unserved.submit(rows, MODEL, tmp_path / "out", **FAST)
    followed = job.watch(SECONDS)
    with full_disk(tmp_path / "unserved", wait_until):
        assert f"embedded Valkey cannot write to {tmp_path}/unserved/valkey: MISCONF" in str(next(followed).error)
    assert next(followed).error is None


class SlowClock:
    """Of a machine on which everything takes half a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        self.now += 0.5
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_who_waits_for_a_slow_ledger_does_not_wait_longer_than_asked(unserved, rows, tmp_path, monkeypatch):
    job, clock = unserved.submit(rows, MODEL, tmp_path / "out", **FAST), SlowClock()
    monkeypatch.setattr(job_module, "time", clock)
    with pytest.raises(JobTimeoutError):
        job.wait(1.75, start_worker=False)
    # What is asked at the deadline takes three looks at the clock.
    assert clock.now <= 0.5 + 1.75 + 3 * 0.5


def test_the_clients_shards_are_as_large_as_set(unserved, rows, tmp_path):
    job = unserved.submit(rows, MODEL, tmp_path / "out", **FAST)
    assert [shard.num_rows for shard in unserved.ledger.shards(job.id)] == [32, 32, 16]
