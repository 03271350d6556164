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


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"n_group": 4}, "n_group 4 must divide the 6 experts, into two or more each"),
        ({"n_group": 6}, "n_group 6 must divide the 6 experts, into two or more each"),
        ({"n_group": 3, "topk_group": 4}, "topk_group 4 must be 1 to 3, which n_group is"),
        ({"n_group": 3, "num_experts_per_tok": 3}, "num_experts_per_tok is 3 of 2 experts: topk_group 1 chooses"),
    ],
)
def test_groups_of_experts_that_cannot_be_are_refused(folder, groups, message):
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_pretrained(changed(folder, **groups))
