"""The live requests of the session's server and worker."""

from collections.abc import Iterator

import pytest

from ..api.live_desk import LiveDesk, live_desk
from ..api_server import ApiServer


@pytest.fixture(scope="session")
def desk(api: ApiServer) -> Iterator[LiveDesk]:
    with live_desk(api.data_dir) as desk:
        yield desk
