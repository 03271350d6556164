"""Watching a bulk row: whenever a reader joins, the texts it gets are the stored output."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from .conftest import ApiServer

NUM_ROWS = 24
Wait = Callable[[str], dict[str, Any]]


def submit(api: ApiServer, **changes: Any) -> str:
    rows = [{"text": f"Tell me about parcel number {number}."} for number in range(NUM_ROWS)]
    sampling = {"max_tokens": 96, "ignore_eos": True, "temperature": 1.0}
    return api.post("/jobs", **{"model": api.model, "rows": rows, "prompt": "{text}", "sampling": sampling, **changes})[
        "id"
    ]


def over_sse(api: ApiServer, job_id: str, row: int, **headers: str) -> list[dict[str, Any]]:
    """All events until the end."""
    with api.http.stream("GET", f"/jobs/{job_id}/rows/{row}/stream", headers=headers, timeout=60) as response:
        response.raise_for_status()
        assert response.headers["content-type"].startswith("text/event-stream")
        return [json.loads(line.removeprefix("data: ")) for line in response.iter_lines() if line.startswith("data: ")]


def over_websocket(api: ApiServer, job_id: str, row: int | str, **headers: str) -> list[dict[str, Any]]:
    url = f"ws{api.url.removeprefix('http')}/jobs/{job_id}/rows/{row}/stream"
    with connect(url, open_timeout=60, additional_headers=headers) as socket:
        return [json.loads(text) for text in socket]


def text(events: list[dict[str, Any]]) -> str:
    assert [event["type"] for event in events] == ["tokens"] * (len(events) - 1) + ["end"]
    return "".join(event["text"] for event in events)


def stored(api: ApiServer, job_id: str) -> dict[int, dict[str, Any]]:
    return {row["row"]: row for row in api.get(f"/jobs/{job_id}/results", limit=1000)["data"]}


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def test_rows_watched_from_before_they_begin(api: ApiServer, wait_until_done: Wait, pool: ThreadPoolExecutor) -> None:
    job_id = submit(api, sampling={"max_tokens": 96, "ignore_eos": True, "temperature": 1.0})
    watched = {row: pool.submit(over_sse, api, job_id, row) for row in (0, 7, NUM_ROWS - 1)}
    socket = pool.submit(over_websocket, api, job_id, 11)
    again = pool.submit(over_websocket, api, job_id, 0)
    wait_until_done(job_id)
    rows = stored(api, job_id)
    for row, events in watched.items():
        assert text(events.result()) == rows[row]["output"]
    assert text(socket.result()) == rows[11]["output"]
    assert text(again.result()) == rows[0]["output"]


def test_rows_that_are_stored_by_now(api: ApiServer, wait_until_done: Wait) -> None:
    job_id = submit(api, choices=["billing", "shipping"], sampling={})
    wait_until_done(job_id)
    rows = stored(api, job_id)
    (end,) = over_sse(api, job_id, 3)
    usage = {name: rows[3][name] for name in ("prompt_tokens", "cached_tokens", "completion_tokens")}
    assert (end["type"], end["text"], end["finish_reason"]) == ("end", rows[3]["output"], rows[3]["finish_reason"])
    assert end["usage"] == usage
    assert over_websocket(api, job_id, 3) == [end]
    # What it had of a stream that is not kept any more can not be told from the output alone.
    (expired,) = over_sse(api, job_id, 3, **{"Last-Event-ID": "2"})
    assert expired["error"]["code"] == "stream_expired"
    assert over_websocket(api, job_id, 3, **{"Last-Event-ID": "2"}) == [expired]


@pytest.mark.parametrize("row", ["-1", "x"])
def test_a_row_that_is_none_over_a_websocket(api: ApiServer, row: str) -> None:
    with pytest.raises(InvalidStatus) as refused:
        over_websocket(api, "job_1", row)
    assert refused.value.response.status_code == 422
    assert json.loads(refused.value.response.body)["error"]["param"] == "row"


def test_a_row_that_failed(api: ApiServer, wait_until_done: Wait) -> None:
    job_id = submit(api, rows=[{"text": "a"}, {"other": "b"}], sampling={"max_tokens": 4})
    wait_until_done(job_id)
    (end,) = over_sse(api, job_id, 1)
    assert (end["finish_reason"], end["error"]["code"]) == ("error", "row_failed")
    assert end["error"]["message"] == stored(api, job_id)[1]["error"]


def test_a_row_of_a_job_that_was_cancelled(api: ApiServer, pool: ThreadPoolExecutor) -> None:
    # No worker has this precision.
    job_id = submit(api, dtype="float16")
    waiting = pool.submit(over_sse, api, job_id, 5)
    api.http.post(f"/jobs/{job_id}/cancel").raise_for_status()
    (end,) = waiting.result()
    assert end["error"]["code"] == "not_answered"


def without_content(part: bytes) -> bytes:
    return b""


def with_a_damaged_footer(part: bytes) -> bytes:
    """Which Arrow tells as an error of the disk."""
    return part[:-40] + b"\xff" * 32 + part[-8:]


@pytest.mark.parametrize("damaged", [without_content, with_a_damaged_footer])
def test_a_row_whose_part_cannot_be_read(
    api: ApiServer, wait_until_done: Wait, damaged: Callable[[bytes], bytes]
) -> None:
    job_id = submit(api, sampling={"max_tokens": 2})
    wait_until_done(job_id)
    for part in (api.data_dir / "outputs" / job_id).glob("part-*.parquet"):
        part.write_bytes(damaged(part.read_bytes()))
    (end,) = over_sse(api, job_id, 3)
    assert end["error"]["code"] == "output_damaged"
    assert end["error"]["message"] == f"a part of job {job_id} cannot be read"


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("job_none/rows/0", 404),
        ("{job}/rows/24", 404),
        ("{job}/rows/-1", 422),
        ("{job}/rows/x", 422),
        ("{job}/rows/99999999999", 422),
    ],
)
def test_rows_that_are_none(api: ApiServer, path: str, status: int) -> None:
    job_id = submit(api, dtype="float16")
    assert api.http.get(f"/jobs/{path.format(job=job_id)}/stream").status_code == status
    assert api.http.get(f"/jobs/{job_id}/rows/0/stream", params={"after": "x"}).status_code == 400
    api.http.post(f"/jobs/{job_id}/cancel").raise_for_status()
