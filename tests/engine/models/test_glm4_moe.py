"""GLM-4.5's checkpoints: what tests of all families do not meet."""

import json
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.errors import ModelError
from headrace.engine.request import Request

from ..running import greedy_params, run_all, token_ids


@pytest.fixture
def folder(checkpoint, tmp_path) -> Path:
    return Path(copytree(checkpoint("glm4-moe").folder, tmp_path / "model"))


def changed(folder: Path, **fields: object) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def test_layers_that_guess_ahead_are_left_out(checkpoint, folder):
    tensors = load_file(folder / "model.safetensors")
    further = {name.replace("layers.2.", "layers.3."): t.clone() for name, t in tensors.items() if "layers.2." in name}
    save_file({**tensors, **further, "model.layers.3.eh_proj.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.layers\.3"):
        Engine.from_pretrained(changed(folder, num_nextn_predict_layers=0), EngineConfig(dtype="float32"))
    engine = Engine.from_pretrained(changed(folder, num_nextn_predict_layers=1), EngineConfig(dtype="float32"))
    made = checkpoint("glm4-moe")
    events = run_all(engine, [Request("r", made.prompts[1], greedy_params(len(made.expected[1])))])
    assert token_ids(events["r"]) == made.expected[1]


def test_groups_of_experts_are_refused(folder):
    with pytest.raises(ModelError, match="n_group is 4: experts in groups are not supported"):
        ModelConfig.from_pretrained(changed(folder, n_group=4, topk_group=2))
