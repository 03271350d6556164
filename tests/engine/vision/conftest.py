"""One tiny model for all tests of images."""

import pytest

from .seeing import Oracle, save_seeing_model


@pytest.fixture(scope="session")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder = tmp_path_factory.mktemp("qwen2_5_vl")
    return Oracle(folder, save_seeing_model(folder))
