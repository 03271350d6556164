"""Rows with images are planned by their images: by how many tokens they are, and by which they are."""

import json
import sqlite3
from base64 import b64encode
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.engine.text.tokenizer import Tokenizer
from headrace.engine.vision import reading
from headrace.jobs.client.client import Client
from headrace.jobs.planning.planner import make_planner
from headrace.jobs.planning.rendering import PromptRenderer
from headrace.jobs.planning.rows_planner import PlannedRun, RowsPlanner, planned_row
from headrace.jobs.planning.shard_cutter import ShardCutter
from headrace.jobs.settings import Settings
from headrace.jobs.shards.row_batch import RowBatch
from headrace.jobs.shards.row_requests import RowRequests
from headrace.jobs.spec.row_images import images_fingerprint, row_images
from headrace.jobs.spec.schemas import JobSpec
from headrace.storage.readers import InputRow, InputSource, open_input, open_sql
from headrace.storage.rows.spool import prompt_images, read_shard, without_images, write_shard

from ...engine.vision.seeing import IMAGE_TOKEN, picture, png
from ..attempts import RECEIPT

# The same sizes: nothing but the pixels differs.
FILES = [png(picture(200, 130, seed)) for seed in range(2)]
NUM_TOKENS = 35


@pytest.fixture(scope="module")
def planned(seeing):
    """Plans rows whose values are given, with the column `image`."""

    def plan(*rows, **options):
        spec = JobSpec.parse(model=str(seeing), image="image", **{"prompt": "{text}", **options})
        tokenizer = Tokenizer.from_pretrained(seeing)
        columns = list(rows[0])
        planner = RowsPlanner(PromptRenderer(spec, tokenizer, columns), tokenizer, 512)
        return planner.plan([InputRow(number, values) for number, values in enumerate(rows)])

    return plan


def test_neighbours_have_the_same_image(planned):
    batch = planned(*({"text": f"{number}?", "image": FILES[number % 2]} for number in range(6)))
    items = sorted(batch.items)
    rows = [planned_row(item) for item in items]
    assert sorted(row.row % 2 for row in rows[:3]) in ([0, 0, 0], [1, 1, 1])
    for row in rows:
        assert list(row.prompt_token_ids or ()).count(IMAGE_TOKEN) == NUM_TOKENS
    (_,) = (cutter := ShardCutter(100)).cut(items)
    # From row to row of an image its tokens, and between the two images what comes before them; in whole blocks.
    before = rows[0].prompt_token_ids.index(IMAGE_TOKEN)
    assert cutter.sharing.shared_tokens == 4 * ((before + NUM_TOKENS + 1) // 16 * 16) + before // 16 * 16


def test_messages_may_say_where_a_columns_images_are(planned):
    shown = [{"type": "text", "text": "A"}, {"type": "image"}, {"type": "text", "text": "B"}, {"type": "image"}]
    given = (FILES, FILES[:1], [*FILES, FILES[0]])
    rows = [{"messages": [{"role": "user", "content": shown}], "image": files} for files in given]
    right, few, many = sorted(map(planned_row, planned(*rows, prompt=None).items), key=lambda row: row.row)
    assert right.images == [None, None]
    assert few.error == "image 2 of the prompt is not there: its part has no content"
    assert many.error == "column 'image' has more images than the messages have parts for them"


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("https://example.org/a.png", "nothing is fetched from there"),
        ("/nowhere/a.png", "an image cannot be read from /nowhere/a.png"),
        (7, "an image must be bytes"),
        (None, "column 'image' is null"),
        (b"no image", "image 1 of the prompt is no image that can be read"),
        ({"bytes": None, "path": None}, "an image must be bytes"),
        ("a\0b.png", "an image is at 'a\\x00b.png', which is no path"),
        ("iVBORw0KGgo" * 10000, "...: File name too long"),
    ],
)
def test_what_is_no_image_is_the_rows_error(planned, image, message):
    (item,) = planned({"text": "x", "image": image}).items
    assert message in (planned_row(item).error or "")


def test_images_that_do_not_fit_are_refused_before_their_tokens_are_written(planned, monkeypatch):
    """Some bytes may say that they are an image of thousands of tokens, and a row has room for many."""
    monkeypatch.delattr(reading, "_places")
    (item,) = planned({"text": "x", "image": FILES[:1] * 15}).items
    error = planned_row(item).error or ""
    assert "the model's context holds 512 with the answer" in error
    assert len(error) < 100


def test_messages_name_no_files_of_ours(planned, tmp_path):
    """They may be anybody's who may send us rows."""
    (file := tmp_path / "secret.png").write_bytes(FILES[0])
    parts: list[Mapping[str, object]] = [
        {"type": "image", "image": str(file)},
        *({"type": "image_url", "image_url": {"url": url}} for url in (str(file), f"file://{file}")),
    ]
    for part in parts:
        row = {"messages": [{"role": "user", "content": [part]}], "image": []}
        (item,) = planned(row, prompt=None).items
        error = planned_row(item).error or ""
        assert "must be a data URL" in error or "nothing is fetched from there" in error


def test_few_images_are_held_at_a_time(seeing, tmp_path, monkeypatch):
    """Their paths do not say how large they are."""
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"text": "{row}", "image": "none.png"}}\n' for row in range(70)))
    batches, plan = [], RowsPlanner.plan

    def planned(self: RowsPlanner, rows: list[InputRow]) -> PlannedRun:
        batches.append(len(rows))
        return plan(self, rows)

    monkeypatch.setattr(RowsPlanner, "plan", planned)
    spec = JobSpec.parse(model=str(seeing), image="image", prompt="{text}")
    with make_planner(spec, 100, tmp_path).plan(open_input(tmp_path / "rows.jsonl")) as found:
        assert found.num_errors == 70
    assert batches == [32, 32, 6]


def test_other_files_at_the_same_paths_make_another_input(tmp_path):
    (image := tmp_path / "a.png").write_bytes(FILES[0])
    rows = [
        {"image": each} for each in (str(image), [str(image), str(tmp_path / "none.png")], "a\0b", "https://a.b", 7)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def fingerprint() -> str:
        return images_fingerprint(open_input(tmp_path / "rows.jsonl"), "image")

    before = fingerprint()
    assert fingerprint() == before != ""
    image.write_bytes(FILES[1])
    assert fingerprint() not in ("", before)
    (tmp_path / "rows.jsonl").write_text('{"image": "data:image/png;base64,AAAA"}\n{"image": null}\n')
    assert fingerprint() == ""


def test_a_query_that_returns_other_rows_by_now_is_the_same_input(tmp_path):
    with closing(sqlite3.connect(tmp_path / "shop.db")) as database:
        database.execute("create table shown (image text)")
        for number, file in enumerate(FILES):
            (image := tmp_path / f"{number}.png").write_bytes(file)
            with database:
                database.execute("insert into shown values (?)", [str(image)])
            source = open_sql(f"sqlite:///{tmp_path / 'shop.db'}", "select image from shown")
            assert len(list(source)) == number + 1
            assert images_fingerprint(source, "image") == ""


def test_bytes_in_rows_of_ours_are_data_urls(tmp_path):
    rows: list[dict[str, object]] = [{"image": FILES[0]}, {"image": [{"bytes": FILES[1], "path": "a.png"}]}]
    client = Client(Settings(data_dir=tmp_path, database_url=f"sqlite:///{tmp_path / 'ledger.db'}"))
    with client, client.rows_file(rows) as path:
        assert [row_images(row.values, "image") for row in open_input(path)] == [FILES[:1], FILES[1:]]


def table_of(rows: list[dict[str, Any]], seeing: Path, tmp_path: Path, **options: Any) -> tuple[JobSpec, pa.Table]:
    """Rows as their shard has them."""
    spec = JobSpec.parse(model=str(seeing), **options)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return spec, spooled(open_input(tmp_path / "rows.jsonl"), spec, tmp_path)


def spooled(source: InputSource, spec: JobSpec, tmp_path: Path) -> pa.Table:
    with make_planner(spec, 100, tmp_path).plan(source) as plan:
        (shard,) = plan.spool(tmp_path / "spool")
    return read_shard(Path(shard.spool_path))


def shown(table: pa.Table, spec: JobSpec, seeing: Path) -> dict[str, list[object]]:
    """The files that the engine is asked with, by the rows' numbers."""
    requests = RowBatch(table, (), RowRequests(spec, Tokenizer.from_pretrained(seeing), "7"), RECEIPT).requests
    return {each.request_id.removeprefix("7/"): [image.source for image in each.images] for each in requests}


def data_url(file: bytes) -> str:
    return f"data:image/png;base64,{b64encode(file).decode()}"


def test_what_a_column_has_is_not_spooled_again(seeing, tmp_path):
    """Under a name that the output does not use for it either."""
    (tmp_path / "a.png").write_bytes(FILES[0])
    kind = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    here, there = {"bytes": FILES[1], "path": "b.png"}, {"bytes": None, "path": str(tmp_path / "a.png")}
    images = [[here], [there], [here, there, here], []]
    table = pa.table({"text": list("abcd"), "output": pa.array(images, kind)})
    pq.write_table(table, tmp_path / "rows.parquet")
    spec = JobSpec.parse(model=str(seeing), image="output", prompt="{text}")
    table = spooled(open_input(tmp_path / "rows.parquet"), spec, tmp_path)
    beside = dict(zip(table["row"].to_pylist(), prompt_images(table), strict=True))
    assert beside == {0: [None], 1: [FILES[0]], 2: [None, FILES[0], None], 3: ()}
    # Read when it was submitted: where a worker runs there may be another.
    (tmp_path / "a.png").write_bytes(b"")
    assert shown(table, spec, seeing) == {"0": FILES[1:], "1": FILES[:1], "2": [FILES[1], *FILES], "3": []}


def test_nor_what_messages_have(seeing, tmp_path):
    (tmp_path / "a.png").write_bytes(FILES[0])
    inline = {"type": "image_url", "image_url": {"url": data_url(FILES[1])}}
    place, text = {"type": "image"}, {"type": "text", "text": "a"}
    rows = [
        {"messages": [{"role": "user", "content": content}], "image": images}
        for content, images in (
            ([inline, text], []),
            ([place, inline, place], [str(tmp_path / "a.png"), data_url(FILES[1])]),
            ("plain", data_url(FILES[0])),
            ("plain", []),
        )
    ]
    rows.append({"messages": json.dumps(rows[0]["messages"]), "image": []})
    spec, table = table_of(rows, seeing, tmp_path, image="image")
    beside = dict(zip(table["row"].to_pylist(), prompt_images(table), strict=True))
    assert beside == {0: [None], 1: [FILES[0], None, None], 2: [None], 3: (), 4: [None]}
    two = FILES[1:]
    assert shown(table, spec, seeing) == {"0": two, "1": [FILES[0], *two, *two], "2": FILES[:1], "3": [], "4": two}
    spec, table = table_of([{"messages": row["messages"]} for row in (rows[0], rows[3])], seeing, tmp_path)
    assert shown(table, spec, seeing) == {"0": two, "1": []}


def test_a_rows_id_may_be_its_image(seeing, tmp_path):
    """A path, a data URL, or several: the output has it as text, and under its own name."""
    (path := tmp_path / "a.png").write_bytes(FILES[0])
    ids = (str(path), data_url(FILES[1]), [data_url(FILES[1]), str(path)])
    rows = [{"text": "a", "custom_id": each} for each in ids]
    spec, table = table_of(rows, seeing, tmp_path, image="custom_id", prompt="{text}")
    assert shown(table, spec, seeing) == {"0": FILES[:1], "1": FILES[1:], "2": FILES[::-1]}


def test_images_travel_beside_the_rows(planned, tmp_path):
    paths = [str(tmp_path / f"{number}.png") for number in range(2)]
    for path, file in zip(paths, FILES, strict=True):
        Path(path).write_bytes(file)
    rows = [planned_row(item) for item in planned({"text": "x", "image": paths}, {"text": "y", "image": []}).items]
    schema = pa.schema([("text", pa.string())])
    write_shard(tmp_path / "shard.parquet", rows, schema)
    table = read_shard(tmp_path / "shard.parquet")
    assert sorted(prompt_images(table), key=len) == [(), FILES]
    assert without_images(table).column_names == ["row", "custom_id", "text", "prompt_token_ids", "plan_error"]
    write_shard(tmp_path / "texts.parquet", [row for row in rows if not row.images], schema)
    assert read_shard(tmp_path / "texts.parquet").column_names == without_images(table).column_names
