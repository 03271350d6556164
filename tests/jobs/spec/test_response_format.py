"""What an answer has to look like, from the job's description to its output."""

import json
import queue
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pyarrow as pa
import pytest
from pydantic import BaseModel

from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.text.tokenizer import Tokenizer
from headrace.jobs.cli.job_options import asked
from headrace.jobs.cli.wording import with_options
from headrace.jobs.errors import SpecError
from headrace.jobs.hosting.engine_host import EngineHost
from headrace.jobs.hosting.outcomes import Outcome
from headrace.jobs.shards.row_batch import RowBatch
from headrace.jobs.shards.row_requests import RowRequests
from headrace.jobs.spec.schemas import JobSpec

from ..attempts import RECEIPT
from ..running import MODEL


class Verdict(BaseModel):
    label: str


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"label": {"enum": ["good", "bad"]}, "score": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["label", "score"],
    "additionalProperties": False,
}
AS_SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA}}}


def test_a_description_survives_its_storage():
    spec = JobSpec.parse(model=str(MODEL), sampling=AS_SCHEMA)
    stored = json.loads(spec.model_dump_json())
    assert stored["sampling"]["response_format"]["json_schema"]["schema"] == SCHEMA
    assert JobSpec.model_validate(stored) == spec == JobSpec.model_validate_json(spec.model_dump_json())
    other = {**SCHEMA, "required": ["label"]}
    changed = JobSpec.parse(
        model=str(MODEL), sampling={"response_format": {"type": "json_schema", "json_schema": {"schema": other}}}
    )
    assert changed.fingerprint("input") != spec.fingerprint("input")


def test_plain_text_asks_for_nothing():
    spec = JobSpec.parse(model=str(MODEL), sampling={"response_format": {"type": "text"}})
    assert spec.sampling.params(None).structured_outputs is None


def schema_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format", "lacks json_schema"),
    "schema of nothing": (
        {"response_format": {**AS_SCHEMA["response_format"], "type": "text"}},
        "response_format",
        "type text has no use for json_schema",
    ),
    "number": (
        {"response_format": 5},
        "response_format",
        "must be an object such as .* the class of a pydantic model, not 5$",
    ),
    "model's instance": (
        {"response_format": Verdict(label="a")},
        "response_format",
        "must be an object such as .* the class of a pydantic model$",
    ),
    "type": ({"response_format": {"type": "xml"}}, "response_format.type", "'text', 'json_object' or 'json_schema'"),
    "unsupported": (schema_format({"uniqueItems": True}), "response_format", r'Unimplemented keys: \["uniqueItems"\]'),
    "impossible": (schema_format({"enum": []}), "response_format", "Unsatisfiable schema"),
    "pattern": (schema_format({"type": "string", "pattern": "("}), "response_format", "unclosed group"),
    "regex": ({"structured_outputs": {"regex": "("}}, "structured_outputs", "unclosed group"),
    "nothing": ({"structured_outputs": {}}, "structured_outputs", "need exactly one of json"),
    "both": (
        {"structured_outputs": {"regex": "a"}, **AS_SCHEMA},
        "structured_outputs",
        "excludes response_format: give one of the two",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_at_submit_and_named(name):
    sampling, field, message = REFUSED[name]
    with pytest.raises(SpecError, match=message) as caught:
        JobSpec.parse(model=str(MODEL), sampling=sampling)
    assert caught.value.field == f"sampling.{field}"


def test_choices_exclude_it():
    with pytest.raises(SpecError, match="structured_outputs has no meaning with choices"):
        JobSpec.parse(model=str(MODEL), choices=["a", "b"], sampling=AS_SCHEMA)


@pytest.fixture(scope="module")
def host():
    engine = Engine.from_pretrained(MODEL, EngineConfig(num_gpu_blocks_override=64, max_num_seqs=8))
    with EngineHost(engine) as running:
        yield running


@pytest.mark.parametrize(
    ("sampling", "fits"),
    [
        (AS_SCHEMA, lambda text: jsonschema_rs.is_valid(SCHEMA, json.loads(text))),
        ({"structured_outputs": {"regex": "[a-c]{3}-[0-9]"}}, lambda text: re.fullmatch("[a-c]{3}-[0-9]", text)),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: text in ("yes", "no")),
    ],
    ids=["schema", "expression", "texts"],
)
def test_every_answer_of_a_shard_follows_it(host, sampling, fits):
    tokenizer = Tokenizer.from_pretrained(MODEL)
    prompts = [tokenizer.encode(f"ticket {row}") for row in range(6)]
    table = pa.table(
        {
            "row": list(range(6)),
            "custom_id": list(map(str, range(6))),
            "prompt_token_ids": prompts,
            "plan_error": pa.nulls(6, pa.string()),
        }
    )
    spec = JobSpec.parse(model=str(MODEL), sampling={"temperature": 1.5, "n": 2, "max_tokens": 120, **sampling})
    batch = RowBatch(table, (), RowRequests(spec, tokenizer, "1"), RECEIPT)
    batch.record(answered(host, batch))
    rows = batch.take_finished().to_pylist()
    assert len(rows) == 6
    for row in rows:
        assert row["finish_reason"] == "stop"
        assert all(fits(text) for text in row["outputs"]), row


def answered(host: EngineHost, batch: RowBatch) -> list[Outcome]:
    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    requests = batch.requests
    host.submit(requests, outcomes.put)
    return [outcomes.get(timeout=60) for _ in requests]


def test_the_command_line_takes_a_schema_from_a_file_or_as_it_is(tmp_path):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    for given in (str(file), f"@{file}", json.dumps(SCHEMA)):
        spec = asked(str(MODEL), "input.jsonl", json_schema=given).spec
        assert spec.sampling.response_format.json_schema.schema_ == SCHEMA
    assert asked(str(MODEL), "input.jsonl", regex="a+").spec.sampling.structured_outputs.regex == "a+"
    for given, message in (("{", "--json-schema is no JSON"), (str(Path("nowhere.json")), "cannot be read")):
        with pytest.raises(SpecError, match=message):
            asked(str(MODEL), "input.jsonl", json_schema=given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"json_schema": '{"type": "strin"}'}, "^--json-schema: Invalid type: strin"),
        ({"regex": "("}, "^--regex: .*unclosed group"),
        ({"regex": "a", "choices": "a,b"}, "^--choices, --json-schema and --regex exclude each other"),
        ({"regex": "a", "json_schema": "{}"}, "^--choices, --json-schema and --regex exclude each other"),
        ({"temperature": -1.0}, "^--temperature must be"),
    ],
    ids=str,
)
def test_the_command_line_refuses_them_by_the_names_of_its_options(options, message):
    with pytest.raises(SpecError) as refusal:
        asked(str(MODEL), "input.jsonl", **options)
    assert re.search(message, with_options(refusal.value))
