"""What the tests of the HTTP API share; the session's server, `api`, is that of all tests of the queue side."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.storage.ledger.ledger import Ledger

from ..api_server import ApiServer as ApiServer
from ..api_server import start_api as start_api
from ..api_server import stop_api as stop_api
from .live_desk import LiveDesk, live_desk
from .own_server import Server, start_server
from .receiver import Receiver, receiving


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose jobs nobody works on."""
    server = start_server(tmp_path_factory.mktemp("unattended"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def desk(api: ApiServer) -> Iterator[LiveDesk]:
    """The live requests of the session's server and worker."""
    with live_desk(api.data_dir) as desk:
        yield desk


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    """Whom webhooks are sent to."""
    with receiving() as receiver:
        yield receiver


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    """One that no worker knows of."""
    ledger = Ledger(f"sqlite:///{tmp_path / 'ledger.db'}")
    ledger.migrate()
    yield ledger
    ledger.close()
