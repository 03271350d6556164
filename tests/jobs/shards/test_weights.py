"""What tells a worker's weights from others: read once, and again where that could not be."""

from pathlib import Path

import pytest

from headrace.engine.checkpoints.hub import LocatedModel
from headrace.jobs.shards.weights import ModelWeights, folder_identity

from ..models import write_model_folder


def test_files_that_could_not_be_read_are_read_again(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    # As a share that is away for a moment; root may read any file.
    config = (folder / "config.json").rename(tmp_path / "config.json")
    (folder / "config.json").mkdir()
    weights = ModelWeights(LocatedModel(str(folder), folder))
    for _ in range(2):
        with pytest.raises(IsADirectoryError):
            weights.identity()
    (folder / "config.json").rmdir()
    config.rename(folder / "config.json")
    assert weights.identity() == weights.identity() == folder_identity(folder)


def test_a_part_that_has_gone_keeps_nobody_waiting(tmp_path: Path) -> None:
    part = tmp_path / "m-00001-of-00002.gguf"
    part.write_bytes(b"x")
    with pytest.raises(OSError, match="m-0000"):
        ModelWeights(LocatedModel(str(part), part)).identity()


def test_another_chat_template_makes_another_model(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    identities = [folder_identity(folder)]
    (folder / "additional_chat_templates").mkdir()
    for source in ("a", "b"):
        (folder / "additional_chat_templates/tool_use.jinja").write_text(source)
        identities.append(folder_identity(folder))
    assert len(set(identities)) == 3
