"""Jobs for a model of the Hugging Face Hub: what they are tied to is its commit, wherever it is said."""

from pathlib import Path

import pytest
from huggingface_hub import constants

from headrace.engine.checkpoints.hub import public_name
from headrace.jobs.api.errors import ApiError
from headrace.jobs.api.models import ServedModels
from headrace.jobs.client.client import Client
from headrace.jobs.settings import Settings

from ..engine.checkpoints.fake_hub import running_hub
from .running import MODEL, assert_refused, environment, label_arguments, started

FIRST, SECOND = "1" * 40, "2" * 40


class Cache:
    """A cache as the Hub's library lays it out, with `org/tickets` in it; offline."""

    def __init__(self, home: Path) -> None:
        self._folder = home / "hub/models--org--tickets"
        for commit in (FIRST, SECOND):
            snapshot = self._folder / "snapshots" / commit
            snapshot.mkdir(parents=True)
            for file in MODEL.iterdir():
                (snapshot / file.name).symlink_to(file)
        (self._folder / "refs").mkdir()
        self.move_main(FIRST)

    def move_main(self, commit: str) -> None:
        (self._folder / "refs/main").write_text(commit)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    cache = Cache(tmp_path)
    # For the processes started from here, and for this one, which may have read its environment already.
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def test_one_that_cannot_be_shared_is_refused_before_there_is_a_job(served, headrace, tickets, tmp_path, cache):
    arguments = label_arguments(tickets, tmp_path / "out")
    arguments[arguments.index(str(MODEL))] = "org/tickets"
    refused = headrace(served, *arguments, "-tp", "64")
    assert_refused(refused, "--tensor-parallel-size=64 must divide num_attention_heads")
    assert not (tmp_path / "out").exists()


def test_a_worker_refuses_one_that_cannot_be_shared_before_its_weights_are_fetched(tmp_path):
    with running_hub({file.name: file.read_bytes() for file in MODEL.iterdir()}) as hub:
        env = environment(tmp_path, HF_HOME=str(tmp_path / "hub"), HF_ENDPOINT=hub.endpoint)
        with started(["worker", "--model", "org/name", "-tp", "64"], env, tmp_path / "worker") as worker:
            assert worker.wait(60) == 2
    assert "--tensor-parallel-size=64 must divide num_attention_heads" in (tmp_path / "worker/err").read_text()
    assert "config.json" in hub.downloaded
    assert not [name for name in hub.downloaded if name.endswith(".safetensors")]


def test_a_job_keeps_the_commit_it_began_with(served, headrace, tickets, tmp_path, cache):
    arguments = label_arguments(tickets, tmp_path / "out")
    arguments[arguments.index(str(MODEL))] = "org/tickets"
    arguments += ["--limit", "5"]
    done = headrace(served, *arguments)
    assert done.status == 0, done
    with Client(Settings.from_environment(environment(served))) as client:
        (job,) = [job for job in client.jobs() if job.record.output_dir == str(tmp_path / "out")]
    assert job.record.model == job.spec.model == f"org/tickets@{FIRST}"

    cache.move_main(SECOND)
    moved = headrace(served, *arguments, "--resume")
    assert (moved.status, "another model" in moved.err) == (2, True), moved
    resumed = headrace(served, *arguments, "--resume", "--revision", FIRST)
    assert "5 of 5: 0 generated, 5 kept from before, 0 failed" in resumed.out


def test_a_model_that_is_not_there_is_refused_before_any_work(served, headrace, tickets, tmp_path, cache):
    arguments = label_arguments(tickets, tmp_path / "out")
    arguments[arguments.index(str(MODEL))] = "org/nothing"
    refused = headrace(served, *arguments)
    assert refused.status == 2
    assert refused.err.startswith(
        "headrace: there is no folder org/nothing here, and model org/nothing is not whole in "
    )
    assert refused.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("cache")
def test_requests_name_a_served_model_by_its_id_or_with_its_commit():
    models = ServedModels.of(["org/tickets", str(MODEL)])
    exact = f"org/tickets@{FIRST}"
    assert models.model("org/tickets").exact_name == models.model(exact).exact_name == exact
    assert models.model("model").exact_name == models.model(str(MODEL)).exact_name == str(MODEL)
    with pytest.raises(ApiError, match=f"'org/tickets@{SECOND}' is not served here: use org/tickets, model"):
        models.model(f"org/tickets@{SECOND}")
    assert (public_name(exact), public_name(str(MODEL))) == ("org/tickets", "model")
