"""Of rows that are large few are read at a time."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.storage.readers import arrow, open_input

DOCUMENT = "a document that all rows are about " * 30
TABLE = pa.table({"image": [bytes([row]) * 1000 for row in range(50)]})


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_large_rows_come_few_at_a_time(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(arrow, "_BATCH_BYTES", 9000)
    if kind == "parquet":
        pq.write_table(TABLE, path := tmp_path / "rows.parquet", compression="none", use_dictionary=False)
    else:
        path = tmp_path
        with pa.ipc.new_stream(path / "data.arrow", TABLE.schema) as stream:
            stream.write_table(TABLE)
        (path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
        (path / "dataset_info.json").write_text("{}")
    source = open_input(path)
    assert isinstance(source, arrow.ArrowSource)
    sizes = [batch.num_rows for file in source._files for batch in source._batches(file)]
    assert max(sizes) <= 9
    assert [row.values["image"] for row in source] == TABLE["image"].to_pylist()


def test_rows_that_share_a_large_value_come_few_at_a_time(tmp_path, monkeypatch):
    """Parquet has it once, and a thousand rows of it in memory were gigabytes."""
    monkeypatch.setattr(arrow, "_BATCH_BYTES", 9000)
    table = pa.table({"document": [DOCUMENT] * 200, "question": [f"question {number}" for number in range(200)]})
    pq.write_table(table, tmp_path / "rows.parquet")
    source = open_input(tmp_path / "rows.parquet")
    assert isinstance(source, arrow.ArrowSource)
    sizes = [batch.num_rows for file in source._files for batch in source._batches(file)]
    assert max(sizes) <= 9
    assert [row.values for row in source] == table.to_pylist()
