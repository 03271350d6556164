"""Checkpoints that fit, whole and sharded, and those that do not: the tensor or the file is named."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shutil import copy, copytree
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.errors import ConfigError, ModelError
from headrace.engine.models import load_model
from headrace.engine.request import Request

from ..families import FAMILIES
from ..running import greedy_params, run_all, token_ids

NORM = "model.layers.1.input_layernorm.weight"
KEY = "model.layers.0.self_attn.k_proj.weight"
EXPERT = "model.layers.2.block_sparse_moe.experts.3.w2.weight"


@pytest.fixture
def folder(tmp_path, chat_folder) -> Path:
    """A copy of the model to break."""
    return Path(copytree(chat_folder, tmp_path / "model"))


@pytest.fixture
def rewrite(folder) -> Callable[[Callable[[dict[str, Tensor]], Any]], None]:
    """Lets a function change the checkpoint's tensors."""
    return partial(change_tensors, folder)


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def load(folder: Path, **options: Any) -> Engine:
    return Engine.from_pretrained(folder, EngineConfig(num_gpu_blocks_override=16, **options))


def answer(folder: Path, **options: Any) -> list[int]:
    return token_ids(run_all(load(folder, **options), [Request("a", [5, 6, 7], greedy_params(8))])["a"])


def test_a_missing_tensor(folder, rewrite):
    rewrite(lambda tensors: tensors.pop(NORM))
    with pytest.raises(ModelError, match=f"lacks the tensor {NORM}"):
        load(folder)


@pytest.mark.parametrize("name", [NORM, KEY])
def test_a_misshapen_tensor(folder, rewrite, name):
    rewrite(lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    with pytest.raises(ModelError, match=rf"tensor {name} .* has shape \(\d+.*; config.json asks for \(\d+"):
        load(folder)


@pytest.fixture
def mixture(tmp_path, checkpoint) -> Path:
    return Path(copytree(checkpoint("mixtral").folder, tmp_path / "mixture"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(EXPERT), f"lacks the tensor {EXPERT}"),
        (
            lambda tensors: tensors.update({EXPERT: torch.ones(3, 4)}),
            rf"tensor {EXPERT} .* has shape \(3, 4\); config.json asks for \(72, 101\)",
        ),
    ],
    ids=["missing", "misshapen"],
)
def test_a_tensor_of_an_expert(mixture, change, message):
    change_tensors(mixture, change)
    with pytest.raises(ModelError, match=message):
        load(mixture)


def test_a_tensor_too_many(folder, rewrite):
    rewrite(lambda tensors: tensors.update({"model.layers.0.mystery.weight": torch.ones(3)}))
    with pytest.raises(ModelError, match=r"a tensor model\.layers\.0\.mystery\.weight that its architecture"):
        load(folder)


def test_layers_beyond_the_configs_number(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(ModelError, match=r"a tensor model\.layers\.1\."):
        load(folder)


def test_computed_buffers_of_old_exports_are_passed_over(folder, rewrite):
    expected = answer(folder)
    rewrite(lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.full((6,), 9.0)}))
    assert answer(folder) == expected


def test_a_tied_checkpoint_may_carry_its_head_as_well(folder, rewrite):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    with_head = answer(folder)
    rewrite(lambda tensors: tensors.pop("lm_head.weight"))
    assert answer(folder) == with_head


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.9], ids=["empty", "in the header", "in the data"])
def test_a_truncated_file(folder, kept):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(ModelError, match=r"model\.safetensors is damaged or truncated") as error:
        load(folder)
    assert "\n" not in str(error.value)


def test_no_weights_at_all(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors: weights must be in safetensors format"):
        load(folder)


@pytest.fixture
def sharded(folder, chat_folder, chat_model) -> Path:
    (folder / "model.safetensors").unlink()
    chat_model.save_pretrained(folder, max_shard_size="60KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    return folder


def test_a_sharded_checkpoint(sharded, chat_folder):
    assert answer(sharded) == answer(chat_folder)


def test_a_missing_shard(sharded):
    victim = sorted(sharded.glob("model-*.safetensors"))[1]
    victim.unlink()
    with pytest.raises(ModelError, match=f"has no {victim.name}"):
        load(sharded)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not valid JSON"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {"lm_head.weight": 5}}', "has no weight_map"),
    ],
)
def test_a_broken_shard_index(sharded, content, message):
    (sharded / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        load(sharded)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_are_converted_to_the_dtype_asked_for(folder, chat_folder, dtype):
    """Half-precision weights computed in float32 are transformers' with the same weights."""
    half = AutoModelForCausalLM.from_pretrained(chat_folder, dtype=dtype)
    half.save_pretrained(folder)
    oracle = half.float().eval()
    with torch.inference_mode():
        tokens = [5, 6, 7]
        for _ in range(8):
            tokens.append(int(oracle(torch.tensor([tokens])).logits[0, -1].argmax()))
    assert answer(folder, dtype="float32") == tokens[3:]


def test_bfloat16_runs_and_stays_close(chat_folder):
    """The same first token with the same probability, roughly, of a few choices."""
    assert len(answer(chat_folder, dtype="bfloat16")) == 8
    assert answer(chat_folder, dtype="bfloat16")[0] == answer(chat_folder, dtype="float32")[0]


@pytest.fixture(params=FAMILIES)
def bare_folder(tmp_path, checkpoint, request) -> Path:
    """A folder with a `config.json` and nothing else."""
    copy(checkpoint(request.param).folder / "config.json", tmp_path)
    return Path(tmp_path)


def test_dummy_weights_need_no_checkpoint_and_depend_on_the_seed_alone(bare_folder):
    answers = [answer(bare_folder, load_format="dummy", seed=seed) for seed in (3, 3, 4)]
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]
    assert len(set(answers[0])) > 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_weights_are_rounded_to_the_dtype_after_they_are_drawn(bare_folder, dtype):
    config, options = ModelConfig.from_pretrained(bare_folder), EngineConfig(load_format="dummy", seed=5)
    cpu = torch.device("cpu")
    exact = load_model(config, options, torch.float32, cpu).weight_slots()
    model = load_model(config, options, dtype, cpu)
    for slot, other in zip(exact, model.weight_slots(), strict=True):
        # Gemma's norms stay in float32, and routers whose sigmoids choose.
        is_wide = slot.offset or (config.moe is not None and config.moe.has_wide_router and ".mlp.gate." in slot.name)
        assert other.destination.dtype == (torch.float32 if is_wide else dtype)
        assert torch.equal(slot.destination.to(other.destination.dtype), other.destination), slot.name
        assert slot.destination.numel() == 1 or slot.destination.std() > 0, slot.name


def test_dummy_weights_saved_are_a_checkpoint_that_answers_the_same(bare_folder):
    expected = answer(bare_folder, load_format="dummy", seed=5)
    config, options = ModelConfig.from_pretrained(bare_folder), EngineConfig(load_format="dummy", seed=5)
    model = load_model(config, options, torch.float32, torch.device("cpu"))
    tensors = {slot.name: slot.stored() for slot in model.weight_slots()}
    save_file(tensors, bare_folder / "model.safetensors", metadata={"format": "pt"})
    assert answer(bare_folder) == expected
    oracle = AutoModelForCausalLM.from_pretrained(
        bare_folder, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    with torch.inference_mode():
        assert int(oracle(torch.tensor([[5, 6, 7]])).logits[0, -1].argmax()) == expected[0]


def test_an_unknown_load_format():
    with pytest.raises(ConfigError, match="load_format must be one of auto, dummy, not 'gguf'"):
        EngineConfig(load_format="gguf")
