"""What the tests of live requests share: a Redis for all of them, and a queue for each."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.jobs.embedded.valkey import EmbeddedValkey
from headrace.jobs.live.requests import LiveState

from ..models import write_model_folder
from .desk import Desk, opened_desk


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey(tmp_path_factory.mktemp("live")) as valkey:
        yield valkey


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("models") / "chat", chat=True)


@pytest.fixture
def desk(valkey, model) -> Iterator[Desk]:
    with opened_desk(valkey, model, f"headrace.live.{secrets.token_hex(6)}") as desk:
        yield desk


@pytest.fixture
def ends(desk, wait_until):
    def wait(request):
        wait_until(lambda: desk.requests.get(request.id).state is LiveState.ENDED, f"{request.id} has ended")

    return wait
