"""What comes out of an attempt: answers, labels and log-probabilities as columns, the input's beside them."""

import math
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.request import Request
from headrace.jobs.planning.planner import Planner
from headrace.jobs.spec.sampling import SamplingSpec
from headrace.jobs.spec.schemas import JobSpec
from headrace.storage.readers import open_input
from headrace.storage.rows.spool import PlannedRow

from ...duck import read_by_duckdb
from ...engine.fakes import CONTEXT, fake_answer, fake_logits
from ..attempts import ROWS, ask
from ..models import WORDS


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
    plain = SamplingSpec(max_tokens=12).params(None)
    answers = [fake_answer(Request("r", row.prompt_token_ids or [], plain), CONTEXT) for row in ROWS]
    assert answers != [shop.answer(row.row) for row in ROWS]


def test_the_prompts_tokens_can_be_scored(shop):
    shop.create(ROWS, sampling={"max_tokens": 2, "prompt_logprobs": 1})
    shop.attempt().run()
    for row, values in zip(ROWS, shop.table().to_pylist(), strict=True):
        first, *others = values["prompt_logprobs"]
        assert [entry["token_id"] for entry in values["prompt_logprobs"]] == list(row.prompt_token_ids or [])
        assert (first["logprob"], first["top"]) == (None, [])
        assert all(entry["logprob"] <= entry["top"][0]["logprob"] < 0 for entry in others)
    shop.assert_settled()


def test_choices_give_a_label_with_its_confidence(shop):
    shop.create(ROWS, choices=("a", "b", "c d"))
    shop.attempt().run()
    for values in shop.table().to_pylist():
        probabilities = dict(values["probabilities"])
        assert probabilities.keys() == {"a", "b", "c d"}
        assert sum(probabilities.values()) == pytest.approx(1)
        assert values["label"] == values["output"] == max(probabilities, key=lambda choice: probabilities[choice])
        assert values["confidence"] == probabilities[values["label"]]
        best, second, _ = sorted(probabilities.values(), reverse=True)
        assert values["margin"] == best - second
        assert values["entropy"] == pytest.approx(sum(-each * math.log(each) for each in probabilities.values()))
    doubtful = read_by_duckdb(f"SELECT row FROM '{shop.output}/*.parquet' ORDER BY margin LIMIT 2")
    ranked = sorted(shop.table().to_pylist(), key=lambda values: values["margin"])
    assert [row for (row,) in doubtful] == [values["row"] for values in ranked[:2]]
    shop.assert_settled()


def test_of_one_choice_there_is_no_doubt(shop):
    shop.create(ROWS[:1], choices=("a b",))
    shop.attempt().run()
    (values,) = shop.table().to_pylist()
    assert (values["confidence"], values["margin"], values["entropy"]) == (1.0, 1.0, 0.0)


def test_a_longer_choice_is_not_punished_for_its_length(shop):
    """Tokens that follow from those before count as certain: however many there are, nothing changes."""
    shop.create(ROWS, choices=("a", "b c d e f"))
    shop.attempt().run()
    for row, values in zip(ROWS, shop.table().to_pylist(), strict=True):
        logits = fake_logits(row.prompt_token_ids or ())[[WORDS.index("a"), WORDS.index("b")]]
        assert list(values["probabilities"].values()) == pytest.approx(logits.double().softmax(-1).tolist())


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
        params = shop.params(row.row)
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
    for row, num_top, total in read_by_duckdb(query.format(shop.output)):
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


@pytest.mark.parametrize(
    ("sampling", "output"),
    [
        ({"allowed_token_ids": [1]}, "a a a a a a"),
        ({"bad_words": ["a a a", "a a b"]}, "a a c a a c"),
        ({"bad_words": ["a a a", "a a b"], "stop": "c"}, "a a "),
        ({"bad_words": ["a a a", "a a b"], "stop": "c", "include_stop_str_in_output": True}, "a a c"),
        ({"logit_bias": {0: 100.0}}, ""),
        ({"logit_bias": {0: 100.0}, "skip_special_tokens": False}, "<end> <end> <end> <end> <end> <end>"),
    ],
    ids=str,
)
def test_what_may_be_said_and_what_is_written_out_of_it(sampling, output, shop):
    """Nothing but a, b and c, in this order, is likely."""
    likely = {"logit_bias": {1: 100.0, 2: 60.0, 3: 30.0}, "ignore_eos": True, "max_tokens": 6}
    shop.create(ROWS, sampling=likely | sampling)
    shop.attempt().run()
    assert shop.table()["output"].to_pylist() == [output] * len(ROWS)
    shop.assert_settled()


def test_each_of_several_answers_is_made_of_what_is_allowed(shop):
    shop.create(ROWS, sampling={"n": 3, "temperature": 1.0, "allowed_token_ids": [1, 2], "bad_words": ["a"]})
    shop.attempt().run()
    assert {word for row in shop.table()["outputs"].to_pylist() for text in row for word in text.split()} == {"b"}
