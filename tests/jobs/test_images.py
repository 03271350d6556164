"""Images from the user to the model: in jobs, in live requests and in batches."""

import json
import os
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient
from PIL import Image

from headrace import LLM, SamplingParams
from headrace.jobs.api.app import create_app
from headrace.jobs.api.models import ServedModels
from headrace.jobs.batches.keeper import BatchKeeper
from headrace.jobs.broker.celery_app import shard_queue
from headrace.jobs.broker.redis_access import redis_server
from headrace.jobs.client.client import Client
from headrace.jobs.settings import Settings
from headrace.jobs.spec.precision import Precision
from headrace.jobs.workers.presence import WorkerPresence

from ..engine.vision.seeing import picture, png
from .conftest import wait_until
from .running import MODEL, assert_refused, environment, results, started, write_lines

CAT, DOG = picture(60, 90), picture(112, 84)
BROKEN = png(DOG)[:-2000]
GREEDY = SamplingParams(temperature=0, max_tokens=10)


def url(image: Image.Image | bytes) -> str:
    return f"data:image/png;base64,{b64encode(image if isinstance(image, bytes) else png(image)).decode()}"


def says(*parts: str | Image.Image | bytes) -> list[dict]:
    """A conversation of one message; bytes are an image's."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": url(part)}}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Qwen3-VL; how rows with images are planned is tested with a Qwen2.5-VL."""
    # With it come transformers, which takes its time.
    from ..engine.vision.seeing import save_qwen3_vl

    folder = tmp_path_factory.mktemp("models") / "seeing"
    save_qwen3_vl(folder)
    return folder


@pytest.fixture(scope="module")
def seeing_client(seeing: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client whose jobs of the model that reads images have a worker.

    In a data folder of its own: the session's server does not serve this model, and would refuse its batches.
    """
    command = ["worker", "--model", str(seeing), "--kv-cache-memory-bytes", "4000000", "--parent-pid", str(os.getpid())]
    data_dir, log = tmp_path_factory.mktemp("seeing"), tmp_path_factory.mktemp("worker")
    env, queue = environment(data_dir), shard_queue(str(seeing), Precision())
    with (
        started(command, env, log) as worker,
        Client(Settings.from_environment(env)) as client,
        redis_server(client.settings) as server,
        WorkerPresence(server.url) as presence,
    ):
        wait_until(lambda: presence.is_served(queue) or worker.poll() is not None, "the worker is ready", 120)
        assert worker.poll() is None, (log / "err").read_text()
        yield client


@pytest.fixture(scope="module")
def http(seeing_client: Client, seeing: Path) -> Iterator[TestClient]:
    models = ServedModels.of([str(seeing), str(MODEL)])
    with TestClient(create_app(seeing_client, models)) as http, BatchKeeper.of(seeing_client, models):
        yield http


@pytest.fixture(scope="module")
def expected(seeing):
    """What the model answers to a conversation."""
    llm = LLM(seeing, num_gpu_blocks_override=200)
    return lambda messages: llm.chat(messages, GREEDY)[0].outputs[0].text


CHATS = [says("What is this?", CAT), says(CAT, "or", DOG), [{"role": "user", "content": "No image."}], says(DOG)]
FAR = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.org/cat.png"}}]}]


def test_a_job_with_messages(seeing_client, seeing, expected, tmp_path):
    """What is wrong with a row's image is that row's error, whoever finds it."""
    bad = [FAR, says("Broken:", BROKEN), says(CAT, b"no image"), says("<|image_pad|>", CAT)]
    rows = write_lines(tmp_path / "rows.jsonl", *({"messages": chat} for chat in [*CHATS, *bad]))
    job = seeing_client.submit(rows, str(seeing), tmp_path / "out", max_tokens=10, temperature=0.0)
    job.wait(60, start_worker=False)
    table = results(tmp_path / "out")
    assert table["output"].to_pylist()[: len(CHATS)] == [expected(chat) for chat in CHATS]
    assert table["messages"].to_pylist()[0] == json.dumps(CHATS[0])
    assert not any("prompt_images" in name for name in table.column_names)
    errors = table["error"].to_pylist()[len(CHATS) :]
    for error, words in zip(
        errors,
        [
            "image 1 of the prompt is at 'https://example.org/cat.png', and nothing is fetched from there",
            "image 1 of the prompt is no image that can be read",
            "image 2 of the prompt is no image that can be read",
            "prompt has 2 places for images (token 256) and 1 images",
        ],
        strict=True,
    ):
        assert words in error


def test_a_job_with_a_column_of_images(headrace, seeing_client, seeing, expected, tmp_path):
    """As Hugging Face's data sets store them, as files, and several of a row."""
    (tmp_path / "dog.png").write_bytes(png(DOG))
    kind = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    images = [
        [{"bytes": png(CAT), "path": "cat.png"}],
        [{"bytes": None, "path": str(tmp_path / "dog.png")}, {"bytes": png(CAT), "path": None}],
        [],
        None,
        [{"bytes": None, "path": str(tmp_path / "none.png")}],
    ]
    asked = ["What?", "Which?", "Nothing?", "Null?", "Gone?"]
    pq.write_table(pa.table({"text": asked, "image": pa.array(images, kind)}), tmp_path / "rows.parquet")
    command = ["run", tmp_path / "rows.parquet", "--model", seeing, "--prompt", "{text}", "--max-tokens", "10"]
    output = tmp_path / "out"
    ran = headrace(seeing_client.settings.data_dir, *command, "--image", "image", "--output", output)
    table = results(output)
    answers = [expected(says(CAT, "What?")), expected(says(DOG, CAT, "Which?")), expected([says("Nothing?")[0]])]
    assert table["output"].to_pylist()[:3] == answers, ran
    null, gone = table["error"].to_pylist()[3:]
    assert null == "column 'image' is null"
    assert "column 'image': an image cannot be read from" in gone
    # Of a row whose image file is another one by now the answer would be another one too.
    resumed = headrace(seeing_client.settings.data_dir, *command, "--image", "image", "--output", output, "--resume")
    assert resumed.status == 0, resumed
    (tmp_path / "dog.png").write_bytes(png(CAT))
    changed = headrace(seeing_client.settings.data_dir, *command, "--image", "image", "--output", output, "--resume")
    assert_refused(changed, "another input, or image files that changed or were missing", "--overwrite")
    (tmp_path / "dog.png").write_bytes(png(DOG))
    # What was missing is there now: the failed rows are an input themselves.
    (tmp_path / "none.png").write_bytes(png(CAT))
    pq.write_table(table.filter(pc.is_valid(table["error"])), tmp_path / "failed.parquet")
    repaired = ["run", tmp_path / "failed.parquet", *command[2:], "--image", "image", "--output", tmp_path / "rest"]
    headrace(seeing_client.settings.data_dir, *repaired)
    rest = results(tmp_path / "rest").select(["custom_id", "text", "output"]).to_pylist()
    assert [row["output"] for row in rest] == [None, expected(says(CAT, "Gone?"))]
    assert [row["custom_id"] for row in rest] == ["3", "4"]
    (tmp_path / "none.png").unlink()
    # The images of the data set are what its rows can be made of again.
    verified = headrace(seeing_client.settings.data_dir, "verify", output)
    assert verified.status == 0, verified


def test_answers_that_are_kept_are_an_images_own(seeing_client, seeing, tmp_path):
    """The same text, and images of the same size."""

    def from_cache(name, *seeds):
        rows = write_lines(tmp_path / f"{name}.jsonl", *({"messages": says(picture(60, 60, seed))} for seed in seeds))
        job = seeing_client.submit(rows, str(seeing), tmp_path / name, cache=True, max_tokens=4)
        job.wait(60, start_worker=False)
        return results(tmp_path / name)["from_cache"].to_pylist()

    assert from_cache("first", 1) == [False]
    assert from_cache("second", 2, 1) == [False, True]


def test_what_no_row_could_be_asked_with_is_refused(headrace, seeing_client, seeing, tmp_path):
    rows = write_lines(tmp_path / "rows.jsonl", {"text": "x", "image": "cat.png"})
    folder, command = seeing_client.settings.data_dir, ["run", rows, "--prompt", "{text}", "--output", tmp_path / "out"]
    assert_refused(headrace(folder, *command, "--model", MODEL, "--image", "image"), "reads no images", MODEL.name)
    assert_refused(headrace(folder, *command, "--model", seeing, "--image", "picture"), "'picture'", "text, image")


def test_live_chats(http, seeing, expected):
    for chat in CHATS:
        body = {"model": seeing.name, "messages": chat, "temperature": 0, "max_tokens": 10}
        answer = http.post("/v1/chat/completions", json=body).raise_for_status().json()
        assert answer["choices"][0]["message"]["content"] == expected(chat)


@pytest.mark.parametrize(
    ("model", "messages", "words"),
    [
        (MODEL.name, CHATS[0], f"model {MODEL.name} reads no images"),
        ("seeing", FAR, "nothing is fetched from there"),
        ("seeing", says(b"no image"), "image 1 of the prompt is no image"),
        ("seeing", [{"role": "user", "content": [{"type": "image_url"}]}], "must have 'image_url'"),
        ("seeing", [{"role": "user", "content": [{"type": "input_audio"}]}], "'text' and 'image_url' are read here"),
    ],
    ids=["blind", "far", "no image", "no url", "sound"],
)
def test_live_chats_that_are_refused(http, model, messages, words):
    refused = http.post("/v1/chat/completions", json={"model": model, "messages": messages})
    assert refused.status_code == 400
    assert words in refused.json()["error"]["message"]


def test_a_live_chat_whose_image_is_broken(http, seeing):
    """Known when it is decoded."""
    refused = http.post("/v1/chat/completions", json={"model": seeing.name, "messages": says(BROKEN)})
    assert refused.status_code == 400
    assert "image 1 of the prompt is no image that can be read" in refused.json()["error"]["message"]


def test_a_batch(http, seeing, expected):
    lines = [
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": seeing.name, "messages": chat, "temperature": 0, "max_tokens": 10},
        }
        for number, chat in enumerate([*CHATS, FAR])
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    file = http.post("/v1/files", files={"file": ("batch.jsonl", data)}, data={"purpose": "batch"}).raise_for_status()
    asked = {"input_file_id": file.json()["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = http.post("/v1/batches", json=asked).raise_for_status().json()
    wait_until(
        lambda: http.get(f"/v1/batches/{batch['id']}").json()["status"] in ("completed", "failed"),
        "the batch has ended",
    )
    batch = http.get(f"/v1/batches/{batch['id']}").json()
    assert batch["status"] == "completed", batch
    answers = {
        line["custom_id"]: line["response"]["body"]["choices"][0]["message"]["content"]
        for line in map(json.loads, http.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines())
    }
    assert answers == {str(number): expected(chat) for number, chat in enumerate(CHATS)}
    (error,) = map(json.loads, http.get(f"/v1/files/{batch['error_file_id']}/content").text.splitlines())
    assert error["custom_id"] == "4"
    assert "nothing is fetched from there" in json.dumps(error)
