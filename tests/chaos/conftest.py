"""`--chaos-seeds N` disturbs N jobs; each seed decides what happens to its job, and in what order."""

from collections.abc import Iterator

import pytest

from ..postgres import PostgresServer, postgres_binaries, running_postgres


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        first, _, end = metafunc.config.getoption("--chaos-seeds").rpartition(":")
        metafunc.parametrize("seed", range(int(first or 0), int(end)))


@pytest.fixture
def num_rows(pytestconfig: pytest.Config) -> int:
    return int(pytestconfig.getoption("--chaos-rows"))


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server that may be stopped."""
    binaries = postgres_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL that could be stopped: install it")
    with running_postgres(binaries) as server:
        yield server
