"""A batch's rows are made again from its input file, each as it was asked."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from openai import OpenAI

from headrace.jobs.open_ledger import open_ledger
from headrace.jobs.settings import Settings
from headrace.storage.ledger.records import JobRecord

from ..api.batch_lines import chat_line, create, wait_for
from ..api_server import ApiServer
from ..running import LABELS, Result, environment

WORDS = "Where is my parcel, please?"
LINES = [
    chat_line("greedy", WORDS, max_tokens=12),
    # Its seed comes from the batch's.
    chat_line("drawn", WORDS, temperature=1.5, max_tokens=12),
    chat_line("drawn too", WORDS, temperature=1.5, max_tokens=12),
    chat_line("seeded", WORDS, temperature=1.5, seed=11, max_tokens=12, ignore_eos=True),
    chat_line("two", WORDS, n=2, temperature=1, logprobs=True, top_logprobs=3),
    chat_line("label", WORDS, structured_outputs={"choice": list(LABELS)}),
    chat_line("hot", WORDS, temperature=-1),
]


@pytest.fixture(scope="module")
def batch(openai_client: OpenAI) -> Any:
    batch = wait_for(openai_client, create(openai_client, LINES))
    assert batch.status == "completed"
    return batch


@pytest.fixture
def job(api: ApiServer, batch: Any) -> Iterator[JobRecord]:
    with open_ledger(Settings.from_environment(environment(api.data_dir))) as ledger:
        yield ledger.job(str(ledger.batches.find(batch.id).job_id))


@pytest.fixture
def verify(api: ApiServer, headrace: Callable[..., Result]) -> Callable[..., Any]:
    """Runs the command, which is to end with this status; returns what it says."""

    def verify(name: str, status: int = 0) -> Any:
        result = headrace(api.data_dir, "verify", name, "--json")
        assert result.status == status, result.err
        return json.loads(result.out)

    return verify


def test_its_requests_are_made_again(verify: Callable[..., Any], batch: Any, job: JobRecord) -> None:
    for name in (batch.id, job.id, job.output_dir):
        said = verify(name)
        assert (said["job"], said["differences"]) == (job.id, [])
        assert said["rows"]["generated"] == {"rows": 6, "verified": 6, "equal": 6, "different": 0}
        assert said["rows"]["errors"]["rows"] == 1
        assert said["weights"]["same"] is True


def test_a_row_that_was_changed_is_named(verify: Callable[..., Any], batch: Any, job: JobRecord) -> None:
    for path in Path(job.output_dir).glob("part-*.parquet"):
        table = pq.read_table(path, partitioning=None)
        changed = [row | {"output": "other"} if row["custom_id"] == "drawn" else row for row in table.to_pylist()]
        pq.write_table(pa.Table.from_pylist(changed, schema=table.schema), path)
    (difference,) = verify(batch.id, status=1)["differences"]
    assert (difference["custom_id"], difference["place"]) == ("drawn", "output")


def test_without_its_input_file_it_can_not_be_verified(
    openai_client: OpenAI, api: ApiServer, batch: Any, headrace: Callable[..., Result]
) -> None:
    openai_client.files.delete(batch.input_file_id)
    gone = headrace(api.data_dir, "verify", batch.id)
    assert (gone.status, gone.err.count("\n")) == (2, 1)
    assert f"its input file {batch.input_file_id}, which says how its rows were asked, was deleted" in gone.err
