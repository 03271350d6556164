"""Which rows are drawn, and what they are when they are asked again."""

from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.jobs.errors import NotVerifiable
from headrace.jobs.spec.prompt_template import PromptTemplate
from headrace.jobs.verification.sample import Sample
from headrace.jobs.verification.stored_rows import StoredRows
from headrace.storage.output import part_groups
from headrace.storage.output.local_folder import LocalFolder
from headrace.storage.output.part_groups import PartGroups
from headrace.storage.rows.columns import SchemaUnifier, carried_names, custom_id_of, input_names
from headrace.storage.rows.spool import PlannedRow, carried_fields, write_shard

NUM_ROWS = 1000


def data_set(tmp_path, *cuts, **columns) -> PartGroups:
    """Rows of which every tenth is an error and every fourth other from the cache, in parts that end at `cuts`."""
    rows = list(range(NUM_ROWS))
    table = pa.table(
        {
            "row": rows,
            "error": pa.array([None if row % 10 else "prompt is empty" for row in rows]),
            "from_cache": [row % 10 > 0 and row % 4 == 0 for row in rows],
            **columns,
        }
    )
    folder = tmp_path / f"cut at {cuts}"
    folder.mkdir()
    bounds = (0, *cuts, NUM_ROWS)
    for number, (start, end) in enumerate(pairwise(bounds)):
        pq.write_table(table.slice(start, end - start), folder / f"{number}.parquet", row_group_size=64)
    return PartGroups(LocalFolder(folder), sorted(path.name for path in folder.iterdir()))


def drawn(rows: PartGroups, count: int | float, seed: int = 0) -> list[int]:
    return Sample.draw(rows, count, seed).table["row"].to_pylist()


def test_a_sample_depends_on_its_seed_but_not_on_the_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(part_groups, "_GROUP_PARTS", 2)
    whole, cut = data_set(tmp_path), data_set(tmp_path, 13, 14, 500, 801)
    sample = drawn(whole, 50)
    assert len(set(sample)) == 50
    assert sample == sorted(sample)
    assert all(row % 10 for row in sample)
    assert drawn(cut, 50) == sample
    assert drawn(PartGroups(cut.folder, cut.names[::-1]), 50) == sample
    assert set(drawn(whole, 20)) < set(sample)
    assert drawn(whole, 50, seed=1) != sample


def test_every_row_is_drawn_about_as_often(tmp_path):
    rows = data_set(tmp_path)
    times = dict.fromkeys((row for row in range(NUM_ROWS) if row % 10), 0)
    for seed in range(40):
        for row in drawn(rows, 90, seed):
            times[row] += 1
    assert sum(times.values()) == 40 * 90
    # 4 are expected of each: binomial, so 16 or more of one of 900 rows would come once in ten thousand tries.
    assert max(times.values()) < 16
    assert sum(1 for count in times.values() if count == 0) < 900 * 0.05


def test_rows_are_counted_by_their_kinds_and_a_share_is_of_those_with_an_answer(tmp_path):
    sample = Sample.draw(data_set(tmp_path), 0.1, 0)
    assert (sample.num_generated, sample.num_from_cache, sample.num_errors) == (700, 200, 100)
    assert len(sample.table) == 90
    # Of 900, a little less than one: a share is rounded up.
    assert len(drawn(data_set(tmp_path, 1, 2), 0.0011)) == 1
    assert len(drawn(data_set(tmp_path, 2), 10_000)) == 900


def test_without_an_answer_there_is_nothing_to_draw(tmp_path):
    with pytest.raises(NotVerifiable, match="none of the 1000 rows"):
        Sample.draw(data_set(tmp_path, error=["no"] * NUM_ROWS), 5, 0)


VALUES: tuple[dict[str, Any], ...] = (
    {"text": "a", "label": 1, "Input_Row": "x", "mixed": {"a": [1, None]}, "flag": True, "price": 2},
    {"text": "b", "label": 2, "Input_Row": None, "mixed": "plain", "flag": False, "price": 2.5},
    {"text": 'c"\\', "label": None, "Input_Row": "y", "mixed": 3.5, "flag": None, "price": None},
)


def test_stored_rows_render_the_prompts_that_the_input_rendered(tmp_path):
    unifier = SchemaUnifier()
    for values in VALUES:
        unifier.observe(values)
    schema = unifier.schema()
    rows = [PlannedRow(10 * n, f"id {n}", values, None, None) for n, values in enumerate(VALUES)]
    write_shard(tmp_path / "shard.parquet", rows, schema)
    spooled = pq.read_table(tmp_path / "shard.parquet")
    stored = StoredRows("job_1", spooled.select(["row", "custom_id", *(each.name for each in carried_fields(schema))]))
    again = list(stored)
    assert [row.row for row in again] == [0, 10, 20]
    assert [row.values.pop("custom_id") for row in again] == ["id 0", "id 1", "id 2"]
    assert [row.values for row in again] == list(VALUES)
    template = PromptTemplate("{text} {mixed} {flag} {price}")
    for row, values in zip(again[:2], VALUES[:2], strict=True):
        assert template.render(row.values) == template.render(values)
    assert stored.columns == ["custom_id", *again[0].values]


def test_images_that_are_the_rows_ids_are_found_again():
    given = [["a.png", "b.png"], {"bytes": None, "path": "c.png"}, "d.png", "[e].png", "7"]
    ids = [custom_id_of({"custom_id": each}, row) for row, each in enumerate(given)]
    table = pa.table({"row": range(len(given)), "custom_id": ids})
    again = list(StoredRows("job_1", table, ids_are_images=True))
    assert [row.values["custom_id"] for row in again] == given
    assert [custom_id_of(row.values, row.row) for row in again] == ids
    assert [row.values["custom_id"] for row in StoredRows("job_1", table)] == ids


@pytest.mark.parametrize(
    "names", [["label", "x"], ["label", "input_label"], ["Row", "input_row"], ["input_other", "input_input_error"]]
)
def test_names_that_gave_way_are_found_again(names):
    carried = carried_names(names)
    back = input_names(carried.values())
    for name, name_there in carried.items():
        # A name that only looks as if it had given way is one of ours anyway.
        assert back[name_there] == name or (name.startswith("input_") and name not in back.values())
