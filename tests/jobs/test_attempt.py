"""A shard's way through an attempt: real ledger, real folder, and whatever can go wrong on the way."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.engine.model_config import ModelConfig
from headrace.engine.request import Request
from headrace.jobs.attempt import ShardAttempt
from headrace.jobs.errors import Stopped
from headrace.jobs.planner import Planner
from headrace.jobs.schemas import JobSpec, SamplingSpec
from headrace.storage.errors import LeaseLost, LedgerUnavailable
from headrace.storage.ledger import Ledger
from headrace.storage.readers import open_input
from headrace.storage.records import AttemptOutcome, Claim, JobState, NewJob, NewShard, ShardState
from headrace.storage.spool import PlannedRow

from ..engine.fakes import CONTEXT, fake_answer, fake_logits
from .answers import GatedRunner, hosted
from .conftest import wait_until
from .models import WORDS, write_model_folder
from .shop import JOB, LONG, OVER, SHARD, Shop


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture
def shop(tmp_path, model) -> Iterator[Shop]:
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    ledger.migrate()
    runner = GatedRunner()
    with hosted(runner, max_num_seqs=1) as (host, _):
        yield Shop(tmp_path, model, ledger, runner, host, iter(range(100)))
    ledger.close()


@pytest.fixture
def start() -> Iterator[Callable[..., "Future[Any]"]]:
    with ThreadPoolExecutor(4) as pool:
        yield pool.submit


def ask(*prompts: Sequence[int]) -> list[PlannedRow]:
    return [PlannedRow(row, str(row), {}, list(prompt), None) for row, prompt in enumerate(prompts)]


ROWS = ask((1, 2), (3,), (4, 5, 6), (7, 8), (9,))


def test_a_shard_is_answered_committed_and_done(shop):
    shop.create(ROWS, sampling={"max_tokens": 4})
    assert shop.attempt().run() is JobState.COMPLETED
    shop.assert_complete()
    assert [attempt.outcome for attempt in shop.ledger.attempts(SHARD)] == [AttemptOutcome.DONE]


def test_each_rows_columns_say_what_it_cost_and_why_it_ended(shop):
    shop.create(ROWS, sampling={"max_tokens": 4})
    shop.attempt().run()
    for row, values in zip(ROWS, shop.table().to_pylist(), strict=True):
        answer = shop.answer(row.row)
        assert values["prompt_tokens"] == len(row.prompt_token_ids or [])
        assert values["completion_tokens"] == len(answer)
        assert values["finish_reason"] == ("length" if 0 not in answer else "stop")
        assert (values["custom_id"], values["cached_tokens"], values["label"]) == (row.custom_id, 0, None)


def test_answers_end_at_the_stop_string(shop):
    shop.create(ROWS, sampling={"max_tokens": 12, "stop": ["c", "never"]})
    shop.attempt().run()
    stopped = 0
    for row, values in zip(ROWS, shop.table().to_pylist(), strict=True):
        answer, text = shop.answer(row.row), shop.text(row.row)
        assert values["output"] == text.split("c")[0]
        if "c" in text:
            stopped += 1
            assert values["finish_reason"] == "stop"
            assert values["completion_tokens"] == answer.index(WORDS.index("c")) + 1
    assert 0 < stopped < len(ROWS)
    shop.assert_settled()


def test_penalties_reach_the_engine(shop):
    shop.create(ROWS, sampling={"max_tokens": 12, "repetition_penalty": 3.0, "presence_penalty": 2.0})
    shop.attempt().run()
    shop.assert_complete()
    plain = SamplingSpec(max_tokens=12).params(0, None)
    answers = [fake_answer(Request("r", row.prompt_token_ids or [], plain), CONTEXT) for row in ROWS]
    assert answers != [shop.answer(row.row) for row in ROWS]


def test_choices_give_a_label_with_its_confidence(shop):
    shop.create(ROWS, choices=("a", "b", "c d"))
    shop.attempt().run()
    for values in shop.table().to_pylist():
        probabilities = dict(values["probabilities"])
        assert probabilities.keys() == {"a", "b", "c d"}
        assert sum(probabilities.values()) == pytest.approx(1)
        assert values["label"] == values["output"] == max(probabilities, key=lambda choice: probabilities[choice])
        assert values["confidence"] == probabilities[values["label"]]
    shop.assert_settled()


def test_sampled_answers_depend_on_the_row_alone(shop):
    same = ask(*[(1, 2)] * 12)
    shop.create(same, sampling={"max_tokens": 8, "temperature": 1.5, "seed": 4})
    shop.attempt().run()
    shop.assert_complete()
    assert len(set(shop.table()["output"].to_pylist())) > 1


def test_several_answers_stand_in_a_list_the_first_in_its_own_column_too(shop):
    rows = [*ROWS[:3], PlannedRow(3, "3", {}, None, "prompt is empty"), *ask((8,), (8,), (8,), (8,), (7, 8))[4:]]
    shop.create(rows, sampling={"max_tokens": 6, "temperature": 1.5, "n": 3})
    shop.attempt().run()
    shop.assert_settled()
    decode = shop.tools.tokenizer.decode
    for row, values in zip(rows, shop.table().to_pylist(), strict=True):
        if row.error:
            assert (values["output"], values["outputs"], values["error"]) == (None, None, "prompt is empty")
            continue
        params = shop.spec.sampling.params(row.row, None)
        samples = [Request("r", list(row.prompt_token_ids or ()), params.of_sample(index)) for index in range(3)]
        answers = [fake_answer(request, CONTEXT) for request in samples]
        assert values["outputs"] == [*map(decode, answers)]
        assert values["output"] == values["outputs"][0]
        assert values["completion_tokens"] == sum(map(len, answers))
    assert len(set(values["outputs"])) > 1


def test_several_draws_from_choices(shop):
    shop.create(ROWS, choices=("a", "b", "c d"), sampling={"temperature": 3.0, "n": 8})
    shop.attempt().run()
    outputs = [values["outputs"] for values in shop.table().to_pylist()]
    assert {label for labels in outputs for label in labels} == {"a", "b", "c d"}
    assert [labels[0] for labels in outputs] == shop.table()["label"].to_pylist()
    shop.assert_settled()


def test_log_probabilities_are_a_column_that_sql_reads(shop):
    shop.create(ROWS, sampling={"max_tokens": 4, "logprobs": True, "top_logprobs": 3})
    shop.attempt().run()
    shop.assert_complete()
    for row, values in zip(ROWS, shop.table().to_pylist(), strict=True):
        tokens = list(row.prompt_token_ids or [])
        assert len(values["logprobs"]) == values["completion_tokens"]
        for token, found in zip(shop.answer(row.row), values["logprobs"], strict=True):
            expected = fake_logits(tokens).double().log_softmax(-1)
            likeliest = expected.argsort(descending=True)[:3].tolist()
            assert (found["token_id"], found["token"]) == (token, " " + WORDS[token])
            assert found["logprob"] == pytest.approx(float(expected[token]), abs=1e-5)
            assert [each["token_id"] for each in found["top"]] == likeliest
            assert [each["logprob"] for each in found["top"]] == pytest.approx(expected[likeliest].tolist(), abs=1e-5)
            tokens.append(token)
    query = "SELECT row, len(logprobs[1].top), list_sum([each.logprob for each in logprobs]) FROM '{}/*.parquet'"
    for row, num_top, total in duckdb.sql(query.format(shop.output)).fetchall():
        column = shop.table()["logprobs"].to_pylist()[row]
        assert (num_top, total) == (3, pytest.approx(sum(each["logprob"] for each in column)))


def test_the_token_itself_is_reported_where_none_of_the_likeliest_is(shop):
    shop.create(ROWS[:2], sampling={"max_tokens": 6, "temperature": 8.0, "logprobs": True, "ignore_eos": True})
    shop.attempt().run()
    for values in shop.table().to_pylist():
        assert [each["top"] for each in values["logprobs"]] == [[]] * 6
        assert [each["token_id"] for each in values["logprobs"]] == shop.answer(values["row"])


def test_answers_end_at_a_stop_token(shop):
    shop.create(ROWS, sampling={"max_tokens": 12, "ignore_eos": True, "stop_token_ids": [7, 9]})
    shop.attempt().run()
    reasons = []
    for values in shop.table().to_pylist():
        answer = shop.answer(values["row"])
        assert values["output"] == shop.tools.tokenizer.decode([token for token in answer if token not in (7, 9)])
        reasons.append(values["finish_reason"])
    assert set(reasons) == {"stop", "length"}


def test_biases_and_minimum_length_reach_the_engine(shop):
    shop.create(ROWS, sampling={"max_tokens": 5, "min_tokens": 3, "logit_bias": {0: 100, 4: 50}})
    shop.attempt().run()
    for values in shop.table().to_pylist():
        assert (values["output"], values["completion_tokens"], values["finish_reason"]) == ("d d d", 4, "stop")


def test_finished_rows_do_not_wait_for_the_others(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    shop.runner.close()
    running = start(shop.attempt().run)
    shop.permit_rows(0, 1)
    wait_until(lambda: shop.num_committed() == 2, "two rows are committed")
    assert set(shop.table()["row"].to_pylist()) == {0, 1}
    shop.runner.open()
    assert running.result() is JobState.COMPLETED
    shop.assert_complete()
    assert len(shop.ledger.parts(JOB)) >= 2


def stop_after(shop: Shop, attempt: ShardAttempt, start: Callable[..., Any], *rows: int) -> None:
    """Run an attempt until these rows are committed, then stop it and hand the shard back."""
    shop.runner.close()
    running = start(attempt.run)
    shop.permit_rows(*rows)
    wait_until(lambda: shop.num_committed() == len(rows), "the rows are committed")
    attempt.stop()
    with pytest.raises(Stopped):
        running.result()
    shop.ledger.release(attempt.claim)
    shop.runner.open()


def test_a_stopped_attempt_is_taken_up_where_it_ended(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    stop_after(shop, shop.attempt(), start, 0, 1)
    before = shop.files()
    shop.runner.num_sequences_started = 0
    shop.attempt().run()
    shop.assert_complete()
    assert shop.files().items() >= before.items()
    # One more may have been under way when the first attempt was stopped.
    assert shop.runner.num_sequences_started in (3, 4)


def test_rows_finished_before_the_stop_are_committed(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    attempt = shop.attempt(tools=replace(shop.tools, flush_seconds=LONG))
    shop.runner.close()
    running = start(attempt.run)
    shop.permit_rows(0, 1)
    wait_until(lambda: attempt._outcomes.empty() and shop.runner.num_sequences_started == 2, "two rows are answered")
    for _ in range(1 + len(shop.answer(0)) + len(shop.answer(1))):
        shop.runner.wait_until_reached()
    attempt.stop()
    with pytest.raises(Stopped):
        running.result()
    assert shop.table()["row"].to_pylist() == [0, 1]


def test_what_a_killed_attempt_left_is_published_or_removed(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    killed = shop.attempt(shop.claim(lease_seconds=OVER))
    stop_after(shop, killed, start, 0, 1)
    committed = shop.output / shop.ledger.parts(JOB)[0].file_name
    committed.rename(shop.output / f".{committed.name}.tmp")
    (shop.output / f".part-00000-{killed.claim.attempt_id:02d}-099.parquet.tmp").write_bytes(b"not committed")
    shop.attempt().run()
    shop.assert_complete()
    assert committed.exists()


def test_a_shard_of_refused_rows_needs_no_engine(shop):
    shop.runner.close()
    shop.create([PlannedRow(0, "x", {}, None, "prompt is empty"), PlannedRow(1, "y", {}, None, "line 2: broken")])
    shop.attempt().run()
    shop.assert_complete()
    assert shop.table()["custom_id"].to_pylist() == ["x", "y"]
    assert shop.table()["prompt_tokens"].to_pylist() == [0, 0]


def test_refused_rows_stand_beside_answered_ones(shop):
    shop.create([*ROWS, PlannedRow(5, "5", {}, None, "column 'text' is null")], sampling={"max_tokens": 4})
    shop.attempt().run()
    shop.assert_complete()


def test_what_the_engine_refuses_is_an_error_row(shop):
    shop.create(ask((1, 2), (99,), (3,)), sampling={"max_tokens": 4})
    shop.attempt().run()
    errors = shop.table()["error"].to_pylist()
    assert errors[0] is errors[2] is None
    assert "token id 99 is outside the vocabulary" in errors[1]
    shop.assert_settled()


def test_an_attempt_that_lost_its_lease_publishes_nothing(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    shop.runner.close()
    slow = shop.attempt(shop.claim(lease_seconds=OVER))
    running = start(slow.run)
    shop.permit_rows(0, 1)
    wait_until(lambda: shop.num_committed() == 2, "two rows are committed, as nobody has taken the shard yet")
    before = shop.files()
    taken = shop.claim()
    shop.runner.open()
    with pytest.raises(LeaseLost):
        running.result()
    assert shop.files() == before
    shop.attempt(taken).run()
    shop.assert_complete()


def test_the_loser_may_come_after_the_shard_is_done(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    shop.runner.close()
    slow = shop.attempt(shop.claim(lease_seconds=OVER))
    running = start(slow.run)
    shop.runner.wait_until_reached()
    other_runner = GatedRunner()
    with hosted(other_runner) as (host, _):
        shop.attempt(tools=replace(shop.tools, host=host)).run()
    before = shop.files()
    shop.runner.open()
    with pytest.raises(LeaseLost):
        running.result()
    assert shop.files() == before
    shop.assert_complete()


def test_two_jobs_parts_in_one_folder_never_share_a_name(shop):
    """An overwritten job's worker may still be writing when the new job's begins."""
    shop.create(ROWS, sampling={"max_tokens": 4})
    old = shop.attempt()
    shop.ledger.cancel_job(JOB)
    job = replace_job(shop, "job_2")
    new = ShardAttempt(shop.tools, job, shop.ledger.job("job_2"))
    new.run()
    before = shop.files()
    with pytest.raises(LeaseLost):
        old.run()
    assert shop.files() == before
    names = {part.file_name for part in shop.ledger.parts("job_2")}
    assert names == before.keys()


def replace_job(shop: Shop, job_id: str, **spec: Any) -> Claim:
    """Another job with the same rows and output folder, and its shard claimed."""
    old, shard = shop.ledger.job(JOB), shop.ledger.shards(JOB)[0]
    job = NewJob(job_id, "q", old.model, old.output_dir, "g", old.num_rows, spec or old.spec)
    shop.ledger.create_job(job, [NewShard(0, shard.num_rows, shard.spool_path)])
    claim = shop.ledger.claim(f"{job_id}/00000", "worker new", LONG)
    assert claim is not None
    return claim


def test_draining_commits_what_is_finished_and_hands_back_the_rest(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    shop.runner.close()
    worker = shop.shard_runner()
    running = start(worker.run, SHARD)
    shop.permit_rows(0, 1)
    wait_until(lambda: shop.num_committed() == 2, "two rows are committed")
    worker.drain()
    running.result()
    assert shop.ledger.shards(JOB)[0].state is ShardState.QUEUED
    assert shop.ledger.attempts(SHARD)[0].outcome is AttemptOutcome.RELEASED
    worker.run(SHARD)
    assert len(shop.ledger.attempts(SHARD)) == 1, "a draining worker takes nothing"
    shop.runner.open()
    shop.shard_runner().run(SHARD)
    shop.assert_complete()


def test_a_cancelled_jobs_attempt_ends_at_the_next_renewal(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    shop.runner.close()
    worker = shop.shard_runner()
    running = start(worker.run, SHARD)
    shop.runner.wait_until_reached()
    worker.renew_leases()
    assert not running.done()
    shop.ledger.cancel_job(JOB)
    worker.renew_leases()
    running.result()
    assert shop.files() == {}


def test_a_shard_that_is_done_or_taken_is_left_alone(shop):
    shop.create(ROWS, sampling={"max_tokens": 4})
    taken = shop.claim()
    shop.shard_runner().run(SHARD)
    assert shop.files() == {}
    shop.attempt(taken).run()
    before = shop.files()
    shop.shard_runner().run(SHARD)
    assert shop.files() == before


def test_the_spool_goes_with_the_job(shop):
    shop.create(ROWS, sampling={"max_tokens": 4})
    shop.shard_runner().run(SHARD)
    assert not (shop.folder / "jobs" / JOB).exists()


def test_an_engine_failure_hands_the_shard_back_with_the_reason(shop):
    shop.create(ROWS, sampling={"max_tokens": 4})
    shop.runner.fail = RuntimeError("out of\nmemory")
    shop.shard_runner().run(SHARD)
    attempt, shard = shop.ledger.attempts(SHARD)[0], shop.ledger.shards(JOB)[0]
    assert (attempt.outcome, shard.state) == (AttemptOutcome.FAILED, ShardState.QUEUED)
    assert attempt.error == "engine failed: RuntimeError: out of memory"
    assert shop.ledger.job(JOB).error == attempt.error
    shop.runner.fail = None
    shop.shard_runner().run(SHARD)
    shop.assert_complete()
    assert shop.ledger.job(JOB).error is None


def test_after_three_engine_failures_the_open_rows_are_error_rows(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    stop_after(shop, shop.attempt(), start, 0, 1)
    shop.runner.fail = RuntimeError("boom")
    for _ in range(3):
        shop.shard_runner().run(SHARD)
    errors = shop.table()["error"].to_pylist()
    assert errors == [None, None, *["engine failed: RuntimeError: boom"] * 3]
    shop.assert_settled()


def test_other_failures_do_not_count_as_the_engines(shop):
    shop.create(ROWS, sampling={"max_tokens": 4})
    away = shop.output.rename(shop.folder / "away")
    for _ in range(3):
        shop.shard_runner().run(SHARD)
    assert "out" in (shop.ledger.job(JOB).error or "")
    away.rename(shop.output)
    shop.runner.fail = RuntimeError("boom")
    shop.shard_runner().run(SHARD)
    shop.runner.fail = None
    shop.shard_runner().run(SHARD)
    shop.assert_complete()


@dataclass
class Unreliable:
    """A ledger whose answers to one method get lost a few times, before or after the call has taken effect."""

    ledger: Ledger
    method: str
    takes_effect: bool
    times: int = 2

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.ledger, name)
        if name != self.method:
            return call

        def unreliable(*arguments: Any) -> Any:
            lost, self.times = self.times > 0, self.times - 1
            if self.takes_effect or not lost:
                result = call(*arguments)
            if lost:
                raise LedgerUnavailable("the database is locked")
            return result

        return unreliable


@pytest.mark.parametrize("takes_effect", [False, True], ids=["not done", "done but not answered"])
@pytest.mark.parametrize("method", ["commit_part", "finish_shard"])
def test_finished_rows_are_kept_until_the_ledger_is_back(shop, method, takes_effect):
    shop.create(ROWS, sampling={"max_tokens": 4})
    ledger: Any = Unreliable(shop.ledger, method, takes_effect)
    assert shop.attempt(tools=replace(shop.tools, ledger=ledger)).run() is JobState.COMPLETED
    assert ledger.times <= 0
    shop.assert_complete()
    assert shop.runner.num_sequences_started == len(ROWS)


def test_an_attempt_can_be_stopped_while_the_ledger_is_away(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    ledger: Any = Unreliable(shop.ledger, "commit_part", takes_effect=False, times=10**6)
    claim = shop.claim(lease_seconds=OVER)
    attempt = shop.attempt(claim, replace(shop.tools, ledger=ledger))
    running = start(attempt.run)
    wait_until(lambda: ledger.times < 10**6, "a commit was tried")
    attempt.stop()
    with pytest.raises(LedgerUnavailable):
        running.result()
    assert shop.num_committed() == 0
    shop.attempt().run()
    shop.assert_complete()


def test_a_part_whose_file_is_gone_is_generated_again(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    stop_after(shop, shop.attempt(), start, 0, 1)
    gone = shop.ledger.parts(JOB)[0].file_name
    (shop.output / gone).unlink()
    shop.attempt().run()
    shop.assert_complete()
    assert gone not in shop.files()


def test_a_damaged_part_is_told_and_left_for_the_user(shop, start):
    shop.create(ROWS, sampling={"max_tokens": 4})
    stop_after(shop, shop.attempt(), start, 0, 1)
    damaged = shop.output / shop.ledger.parts(JOB)[0].file_name
    damaged.write_bytes(b"PAR1 and no more")
    shop.shard_runner().run(SHARD)
    assert f"part {damaged} cannot be read" in (shop.ledger.job(JOB).error or "")
    damaged.unlink()
    shop.shard_runner().run(SHARD)
    shop.assert_complete()


def test_a_spool_that_is_gone_is_told(shop):
    shop.create(ROWS, sampling={"max_tokens": 4})
    Path(shop.ledger.shards(JOB)[0].spool_path).unlink()
    shop.shard_runner().run(SHARD)
    assert "cannot read the spooled shard" in (shop.ledger.job(JOB).error or "")


def test_a_job_that_this_version_cannot_read_is_told(shop):
    shop.create(ROWS, sampling={"max_tokens": 4})
    other = replace_job(shop, "job_2", model=str(shop.model), option_of_tomorrow=1)
    shop.ledger.release(other)
    shop.shard_runner().run("job_2/00000")
    assert "option_of_tomorrow" in (shop.ledger.job("job_2").error or "")
    assert shop.ledger.shards("job_2")[0].state is ShardState.QUEUED


TYPES = pa.schema(
    [
        ("text", pa.string()),
        ("when", pa.timestamp("ns", "Europe/Berlin")),
        ("price", pa.decimal128(12, 3)),
        ("tags", pa.list_(pa.struct([("name", pa.string()), ("n", pa.int16())]))),
        ("day", pa.date32()),
        ("raw", pa.large_binary()),
        ("kind", pa.dictionary(pa.int8(), pa.string())),
        ("score", pa.float32()),
        ("nothing", pa.null()),
        ("row", pa.uint64()),
    ]
)
VALUES: dict[str, list[Any]] = {
    "text": ["a b", "c", "a d"],
    "when": [datetime(2026, 3, 4, 5, 6, 7, 8, UTC), None, datetime(1969, 1, 1, tzinfo=UTC)],
    "price": [Decimal("12.340"), Decimal("-0.001"), None],
    "tags": [[{"name": "x", "n": 1}, None], [], None],
    "day": [date(2026, 2, 28), None, date(1, 1, 1)],
    "raw": [b"\x00\xff", b"", None],
    "kind": ["one", "two", None],
    "score": [0.1, float("inf"), None],
    "nothing": [None, None, None],
    "row": [2**64 - 1, 0, None],
}


def test_the_types_of_a_parquet_input_come_out_as_they_went_in(shop):
    table = pa.table(VALUES, schema=TYPES)
    source = shop.folder / "input.parquet"
    pq.write_table(table, source)
    spec = JobSpec.parse(model=str(shop.model), prompt="{text}")
    planner = Planner(spec, ModelConfig.from_pretrained(shop.model), shop.tools.tokenizer, 10, shop.folder)
    with planner.plan(open_input(source)) as plan:
        (shard,) = plan.shards()
    shop.create(shard, plan.schema, prompt="{text}", sampling={"max_tokens": 4})
    shop.attempt().run()
    output = shop.table()
    for name in TYPES.names:
        carried = "input_row" if name == "row" else name
        assert output.schema.field(carried).type == TYPES.field(name).type, name
        assert output[carried].combine_chunks().equals(table[name].combine_chunks()), name
