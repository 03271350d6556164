"""`--chaos-seeds N` disturbs N jobs; each seed decides what happens to its job, and in what order."""

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--chaos-seeds")))
