"""Files: with the official client, and with forms that it never sends."""

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Response
from fastapi.testclient import TestClient
from openai import APIStatusError, BadRequestError, NotFoundError

from headrace.jobs.api.errors import answer_errors
from headrace.jobs.api.openai.file_content import FileContent
from headrace.storage.ledger.file_records import FileRecord

from ...api_server import ApiServer

BOUNDARY = "headrace-test"
FORM = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}


def upload(client: Any, content: bytes = b"{}\n", name: str = "lines.jsonl", **options: Any) -> Any:
    return client.files.create(file=(name, content), purpose="batch", **options)


def test_a_file_comes_back_as_it_was_sent(openai_client: Any, api: ApiServer) -> None:
    # More than one piece, with what looks like the end of a form in it.
    content = bytes(range(256)) * 12_000 + b"\r\n--nearly\r\n--" + b"x"
    file = upload(openai_client, content, "Fälle.jsonl")
    assert (file.object, file.purpose, file.status) == ("file", "batch", "processed")
    assert (file.bytes, file.filename) == (len(content), "Fälle.jsonl")
    assert file.expires_at == file.created_at + 30 * 86400
    assert abs(file.created_at - time.time()) < 60
    assert openai_client.files.retrieve(file.id) == file
    assert openai_client.files.content(file.id).content == content
    with openai_client.files.with_streaming_response.content(file.id) as response:
        assert int(response.headers["content-length"]) == len(content)
        assert hashlib.sha256(b"".join(response.iter_bytes())).digest() == hashlib.sha256(content).digest()
    gone = openai_client.files.delete(file.id)
    assert (gone.id, gone.object, gone.deleted) == (file.id, "file", True)
    for call in (openai_client.files.retrieve, openai_client.files.content, openai_client.files.delete):
        with pytest.raises(NotFoundError) as missing:
            call(file.id)
        assert missing.value.code == "file_not_found"
    assert not (api.data_dir / "files" / file.id).exists()


@pytest.mark.parametrize("name", ["../../../escaped", "/tmp/escaped", "..", "a\\..\\escaped", 'with "quotes"; x=y'])
def test_a_file_name_is_only_a_name(openai_client: Any, api: ApiServer, name: str) -> None:
    before = {path for path in api.data_dir.rglob("*") if "escaped" in path.name}
    file = upload(openai_client, b"abc", name)
    assert (api.data_dir / "files" / file.id).read_bytes() == b"abc"
    assert openai_client.files.content(file.id).content == b"abc"
    assert openai_client.files.retrieve(file.id).filename == file.filename
    assert before == {path for path in api.data_dir.rglob("*") if "escaped" in path.name}


def test_a_range_of_a_file(openai_client: Any, api: ApiServer) -> None:
    path = f"/v1/files/{upload(openai_client, b'0123456789').id}/content"
    part = api.http.get(path, headers={"Range": "bytes=2-4"})
    assert (part.status_code, part.content, part.headers["content-range"]) == (206, b"234", "bytes 2-4/10")
    beyond = api.http.get(path, headers={"Range": "bytes=10-"})
    assert (beyond.status_code, beyond.headers["content-range"]) == (416, "bytes */10")
    assert beyond.json()["error"] == {
        "message": "Range: the file has 10 bytes",
        "type": "invalid_request_error",
        "param": "Range",
        "code": "invalid_range",
    }
    for wrong in ("lines=0-1", "bytes=", "bytes", "bytes=4-2"):
        answer = api.http.get(path, headers={"Range": wrong})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_range"), wrong


def test_a_file_that_is_removed_before_it_was_opened(tmp_path: Path) -> None:
    app = FastAPI()
    answer_errors(app)

    @app.get("/")
    def content() -> Response:
        (path := tmp_path / "file-1").write_bytes(b"abc")
        record = FileRecord("file-1", "default", "batch", "lines.jsonl", 3, "", 0.0, None)
        found = FileContent.of(path, record)
        path.unlink()
        return found

    answer = TestClient(app).get("/")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "file_not_found")


def test_files_are_listed_by_age_and_purpose(openai_client: Any) -> None:
    ids = [upload(openai_client, str(number).encode()).id for number in range(3)]
    page = openai_client.files.list(limit=2)
    assert [file.id for file in page.data] == ids[:0:-1]
    assert (page.has_more, page.first_id, page.last_id) == (True, ids[2], ids[1])
    assert [file.id for file in openai_client.files.list(after=ids[1], limit=1).data] == ids[:1]
    assert [file.id for file in openai_client.files.list(after=ids[0], order="asc").data] == ids[1:]
    newest_first = [file.id for file in openai_client.files.list(purpose="batch", limit=2)]
    assert newest_first[:3] == ids[::-1]
    assert len(set(newest_first)) == len(newest_first)
    assert not {file.id for file in openai_client.files.list(purpose="batch_output")} & set(ids)
    with pytest.raises(NotFoundError) as cursor:
        openai_client.files.list(after="file-none")
    assert cursor.value.param == "after"
    for bad in ({"limit": 0}, {"limit": 10_001}, {"order": "sideways"}):
        with pytest.raises(BadRequestError) as refused:
            openai_client.files.list(**bad)
        assert refused.value.param == next(iter(bad))


def test_a_file_expires_when_it_is_told_to(openai_client: Any) -> None:
    file = upload(openai_client, expires_after={"anchor": "created_at", "seconds": 3600})
    assert file.expires_at == file.created_at + 3600
    for seconds in (3599, 2_592_001):
        with pytest.raises(BadRequestError) as refused:
            upload(openai_client, expires_after={"anchor": "created_at", "seconds": seconds})
        assert refused.value.param == "expires_after.seconds"
    with pytest.raises(BadRequestError) as other:
        openai_client.files.create(file=("x.jsonl", b"{}"), purpose="fine-tune")
    assert other.value.param == "purpose"


def part(name: str, value: str, more: str = "") -> str:
    return f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{name}"{more}\r\n\r\n{value}\r\n'


END = f"--{BOUNDARY}--\r\n"
FILE = part("file", "{}", '; filename="x"')
PURPOSE = part("purpose", "batch")


@pytest.mark.parametrize(
    ("form", "param"),
    [
        (PURPOSE + END, "file"),
        (FILE + END, "purpose"),
        (PURPOSE + FILE, None),
        (PURPOSE + FILE + FILE + END, "file"),
        (PURPOSE + PURPOSE + FILE + END, "purpose"),
        (PURPOSE + part("file", "{}") + END, "file"),
        (PURPOSE + FILE + part("colour", "red") + END, "colour"),
        (PURPOSE + part("long", "x" * 10_000) + FILE + END, None),
        ("".join(part(f"f{number}", "") for number in range(100)) + END, None),
        (f"--{BOUNDARY}\r\nContent-Type: x\r\n\r\nno name\r\n{END}", None),
        ("nothing like a form", None),
        ("", None),
    ],
    ids=[
        "no file",
        "no purpose",
        "cut short",
        "two files",
        "two purposes",
        "file without a name",
        "unknown field",
        "long field",
        "many fields",
        "part without a name",
        "no form",
        "empty",
    ],
)
def test_a_form_that_can_not_be_read_is_refused(api: ApiServer, form: str, param: str | None) -> None:
    refused = api.http.post("/v1/files", content=form.encode(), headers=FORM)
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert not list((api.data_dir / "files").glob(".incoming-*"))


def test_fields_may_stand_behind_the_file(api: ApiServer) -> None:
    created = api.http.post("/v1/files", content=(FILE + PURPOSE + END).encode(), headers=FORM)
    assert (created.status_code, created.json()["bytes"]) == (200, 2)


def test_only_a_form_is_an_upload(api: ApiServer) -> None:
    for kind in ("application/json", "multipart/form-data", "multipart/form-data; boundary="):
        refused = api.http.post("/v1/files", content=b"{}", headers={"Content-Type": kind})
        assert (refused.status_code, refused.json()["error"]["code"]) == (415, "unsupported_media_type")


def test_an_upload_that_breaks_off_leaves_nothing(api: ApiServer, wait_until: Any) -> None:
    def pieces() -> Iterator[bytes]:
        yield (PURPOSE + part("file", "x" * 3_000_000, '; filename="x"')).encode()
        wait_until(lambda: list((api.data_dir / "files").glob(".incoming-*")), "the upload has begun")
        raise ConnectionError

    with pytest.raises(ConnectionError):
        api.http.post("/v1/files", content=pieces(), headers=FORM)
    wait_until(lambda: not list((api.data_dir / "files").glob(".incoming-*")), "nothing is left")
    assert api.http.get("/health").status_code == 200


def test_errors_are_those_of_the_client(openai_client: Any) -> None:
    with pytest.raises(APIStatusError) as refused:
        openai_client.files.retrieve("file-../../etc")
    assert refused.value.status_code == 404
