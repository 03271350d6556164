"""One tiny model of each family for all tests of images."""

import pytest

from .seeing import Oracle, save_qwen3_vl, save_seeing_model


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("qwen2_5_vl")
    return Oracle(folder, save_seeing_model(folder))


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("qwen3_vl")
    return Oracle(folder, save_qwen3_vl(folder))
