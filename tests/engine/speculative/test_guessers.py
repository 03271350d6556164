"""What does not go together with a model is known before anything is loaded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import save_file

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.errors import ConfigError
from headrace.engine.speculative.guessers import check_guessing
from headrace.engine.speculative.speculative_config import SpeculativeConfig
from headrace.engine.speculative.vocabularies import require_same_vocabulary


@pytest.fixture(scope="module")
def model(chat_folder: Path) -> ModelConfig:
    return ModelConfig.from_pretrained(chat_folder)


def save_heads(folder: Path, **shapes: tuple[int, ...]) -> SpeculativeConfig:
    """One head without blocks; `shapes`: of its tensors, by the layers' names."""
    save_file(
        {f"0.{name}": torch.zeros(shape) for name, shape in shapes.items()}, folder / "medusa_lm_head.safetensors"
    )
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": 1, "medusa_num_layers": 0}))
    return SpeculativeConfig(method="medusa", model=str(folder), num_speculative_tokens=1)


def test_heads_of_another_model(model, tmp_path):
    right = (model.vocab_size, model.hidden_size)
    check_guessing(save_heads(tmp_path, **{"0.weight": right}), model)
    with pytest.raises(ConfigError, match=r"^speculative_config: .* lacks the tensor 0\.0\.weight"):
        check_guessing(save_heads(tmp_path, weight=right), model)
    with pytest.raises(ConfigError, match=r"tensor 0\.0\.weight .* these are not heads of"):
        check_guessing(save_heads(tmp_path, **{"0.weight": (model.vocab_size, 1)}), model)


def test_a_model_that_reads_images_is_guessed_for_by_its_text_alone(model, chat_folder):
    sees: Any = replace(model, vision="eyes")
    check_guessing(SpeculativeConfig(), sees)
    with pytest.raises(ConfigError, match="method draft_model is not supported with a model that reads images"):
        check_guessing(SpeculativeConfig(method="draft_model", model=str(chat_folder)), sees)


def gguf_vocabulary(path: Path, *tokens: str, num_unused: int = 0) -> Path:
    """A GGUF file of a tokenizer alone, filled up with tokens that nothing is cut into."""
    tokens = ("x", "y", "xy", *tokens)
    filling = [f"[PAD{number}]" for number in range(num_unused)]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*tokens, *filling])
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.UNUSED] * num_unused)
    writer.add_token_merges(["x y"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("tokens", "num_unused", "is_same"),
    [("abc", 0, True), ("abc", 2, True), ("acb", 0, False), ("abcd", 0, False), ("ab", 1, True)],
    ids=["equal", "more filling", "swapped", "one more", "filled where the other has a token"],
)
def test_gguf_files_are_compared_by_their_tokens(model, tmp_path, tokens, num_unused, is_same):
    ours = replace(model, path=gguf_vocabulary(tmp_path / "ours.gguf", *"abc"))
    theirs = replace(model, path=gguf_vocabulary(tmp_path / "theirs.gguf", *tokens, num_unused=num_unused))
    if is_same:
        require_same_vocabulary(ours, theirs)
    else:
        with pytest.raises(ConfigError, match="their tokenizers differ in"):
            require_same_vocabulary(ours, theirs)
