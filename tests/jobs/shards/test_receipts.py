"""What rows are stored with so that they can be made again, and jobs that began before there was such a thing."""

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.engine.checkpoints.hub import LocatedModel
from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.jobs.shards.attempt import AttemptTools, ShardAttempt
from headrace.jobs.shards.receipts import Computation, Receipts
from headrace.jobs.shards.weights import ModelWeights, folder_identity
from headrace.jobs.spec.sampling import row_seed
from headrace.jobs.spec.schemas import JobSpec
from headrace.storage.output.local_folder import LocalFolder
from headrace.storage.output.manifest import Manifest, read_report, write_manifest
from headrace.storage.rows.spool import PlannedRow

from ...duck import read_by_duckdb
from ..attempts import ROWS, stop_after
from ..shop import JOB, SHARD, Shop

DRAWN = {"max_tokens": 4, "temperature": 1.0, "seed": 7}


@pytest.fixture
def tools(shop: Shop) -> AttemptTools:
    computation = Computation.of(EngineConfig(dtype="float32", device="cpu"), ModelConfig.from_pretrained(shop.model))
    return replace(shop.tools, receipts=Receipts(ModelWeights(LocatedModel(str(shop.model), shop.model)), computation))


def test_each_answer_has_one(shop, tools, start):
    shop.create(ROWS, sampling=DRAWN)
    shop.tools = tools
    stop_after(shop, shop.attempt(), start, 0, 1)
    shop.attempt().run()
    for values in shop.table().to_pylist():
        receipt = values["receipt"]
        assert receipt.pop("torch")
        assert receipt.pop("headrace")
        assert receipt == {
            "weights": folder_identity(shop.model),
            "seed": row_seed(7, values["row"]),
            "attempt": 1 if values["row"] < 2 else 2,
            "dtype": "float32",
            "quantization": None,
            "kv_cache_dtype": "float32",
            "device": "cpu",
        }


def test_a_job_says_which_other_weights_its_workers_had(shop, tools):
    """Of the same name, on another host or before they were replaced."""
    shop.create(ROWS, sampling=DRAWN)
    write_manifest(LocalFolder(shop.output), Manifest(JOB, "f"))
    shop.ledger.note_weights(JOB, "blake2b:others")
    weights = ModelWeights(LocatedModel(str(shop.model), shop.model))
    replace(shop.shard_runner(), tools=tools, weights=weights).run(SHARD)
    report = read_report(LocalFolder(shop.output))
    assert report is not None
    assert (report["weights"], report["other_weights"]) == ("blake2b:others", [folder_identity(shop.model)])


def test_a_greedy_answer_has_no_seed_and_sql_reads_it(shop, tools):
    shop.create([*ROWS, PlannedRow(5, "5", {}, None, "prompt is empty")], choices=("a", "b"))
    shop.attempt(tools=tools).run()
    columns = "receipt.seed, receipt.attempt, receipt.dtype, receipt IS NULL"
    query = f"SELECT DISTINCT {columns} FROM '{shop.output}/*.parquet' ORDER BY 4"
    assert read_by_duckdb(query) == [(None, 1, "float32", False), (None, None, None, True)]


def test_what_is_auto_is_said_by_name(model):
    found = Computation.of(EngineConfig(device="cpu", kv_cache_dtype="auto"), ModelConfig.from_pretrained(model))
    assert (found.dtype, found.kv_cache_dtype, found.device) == ("float32", "float32", "cpu")


def test_a_job_keeps_the_columns_that_it_began_with(shop, tools):
    """One of before there were these columns, whose input has one of that name."""
    rows = [row._replace(values={"margin": row.row}) for row in ROWS]
    shop.create(rows, pa.schema([pa.field("margin", pa.int64())]), sampling={"max_tokens": 2})
    claim, job = shop.claim(), shop.ledger.job(JOB)
    spooled = pq.read_table(claim.spool_path)
    names = ["margin" if name == "input_margin" else name for name in spooled.column_names]
    pq.write_table(spooled.rename_columns(names), claim.spool_path)
    old = {name: value for name, value in job.spec.items() if name not in ("schema_version", "vote")}
    ShardAttempt(tools, claim, replace(job, spec=old)).run()
    assert shop.table()["margin"].to_pylist() == [row.row for row in ROWS]
    assert not {"entropy", "receipt"} & set(shop.table().column_names)
    shop.assert_complete()


def test_a_job_is_the_same_job_for_a_later_headrace(model):
    """So that its folder can be resumed."""
    spec = JobSpec.parse(model=str(model))
    assert spec.schema_version > JobSpec(model=str(model)).schema_version == 1
    assert spec.fingerprint("input") == JobSpec(model=str(model)).fingerprint("input")
    assert "vote" not in spec.model_dump_json(exclude_defaults=True)
