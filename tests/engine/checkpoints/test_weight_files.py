"""Weights that are refused by what their files say of themselves."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace.engine.checkpoints.gguf.file import GgufModel
from headrace.engine.checkpoints.weight_files import check_weight_files
from headrace.engine.errors import ModelError
from headrace.engine.text.tokenizer import Tokenizer

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


def write(path: Path, *names: str) -> Path:
    save_file({name: np.ones((4, 4), np.float32) for name in names}, path)
    return path


def write_index(folder: Path, **weight_map: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("size", [0, 4, 20, -1])
def test_a_file_that_is_cut_short_is_named(size: int, tmp_path: Path) -> None:
    file = write(tmp_path / "model.safetensors", "a", "b")
    check_weight_files(tmp_path)
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ModelError, match=f"{file} is damaged or truncated"):
        check_weight_files(tmp_path)


def test_a_file_that_git_has_not_fetched_is_named(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("model.safetensors", "tokenizer.json", "model.gguf")]
    for file in files:
        file.write_bytes(POINTER)
    reading = (
        lambda: check_weight_files(tmp_path),
        lambda: Tokenizer.from_pretrained(tmp_path),
        lambda: GgufModel.open(files[2]),
    )
    for file, read in zip(files, reading, strict=True):
        with pytest.raises(ModelError, match=rf"^{file} is a pointer of Git LFS, .*: fetch it with git lfs pull$"):
            read()


def test_a_tensor_that_the_index_promises_is_named_with_its_file(tmp_path: Path) -> None:
    write(tmp_path / "one.safetensors", "a")
    write(tmp_path / "two.safetensors", "b")
    write_index(tmp_path, a="one.safetensors", b="two.safetensors")
    check_weight_files(tmp_path)
    write_index(tmp_path, a="one.safetensors", b="two.safetensors", c="two.safetensors")
    with pytest.raises(ModelError, match=r"two\.safetensors lacks the tensor c, which .*index\.json promises"):
        check_weight_files(tmp_path)


def test_weights_may_be_elsewhere(tmp_path: Path) -> None:
    check_weight_files(tmp_path)
    write_index(tmp_path, a="one.safetensors", b="two.safetensors")
    write(tmp_path / "one.safetensors", "a")
    check_weight_files(tmp_path)
