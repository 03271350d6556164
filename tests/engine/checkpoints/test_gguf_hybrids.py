"""LFM2, Granite 4, Falcon-H1 and Nemotron-H in GGUF files, against transformers with the same weights."""

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from headrace.engine.checkpoints.gguf.config import read_cpu_quantization
from headrace.engine.checkpoints.gguf.tensors import GgufTensors
from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.checkpoints.model_size import num_parameters, state_bytes
from headrace.engine.errors import ModelError

from ..conftest import greedy, save_random_model
from ..families import FURTHER, WITH_STATES
from . import gguf_hybrids
from .gguf_files import write_dequantized, write_gguf
from .test_gguf import PROMPT, generated


def changed(config: Any, **fields: Any) -> Any:
    return type(config)(**config.to_dict() | fields)


CONFIGS: dict[str, Any] = {
    "lfm2": WITH_STATES["lfm2"],
    "lfm2moe": WITH_STATES["lfm2-moe"],
    "granite": FURTHER["granite4"],
    "granitemoe": FURTHER["granite-moe"],
    "granitehybrid": WITH_STATES["granite4-h"],
    "granitehybrid-experts": WITH_STATES["granite4-h-moe"],
    "falcon-h1": WITH_STATES["falcon-h1"],
    "falcon-h1-without-norms": WITH_STATES["falcon-h1-without-norms"],
    "nemotron_h": changed(WITH_STATES["nemotron-h"], layers_block_type=["mamba", "mlp", "mamba", "attention", "mlp"]),
    "nemotron_h_moe": changed(WITH_STATES["nemotron-h"], layers_block_type=["mamba", "moe", "mamba", "attention"]),
    "nemotron_h_moe-latents": WITH_STATES["nemotron-h-latents"],
}
TIED = {"falcon-h1-tied": changed(CONFIGS["falcon-h1"], tie_word_embeddings=True)}
# Such that every matrix has whole blocks, and several in a row: with one int8 is multiplied by int8, which rounds.
EVEN = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "shared_intermediate_size": 96}
NEMOTRON = {"mamba_head_dim": 32, "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 96}
QUANTISED: dict[str, Any] = {
    "lfm2": changed(CONFIGS["lfm2"], **EVEN, block_multiple_of=32),
    "lfm2moe": changed(CONFIGS["lfm2moe"], **EVEN, moe_intermediate_size=64),
    "granitehybrid": changed(CONFIGS["granitehybrid"], **EVEN, **MAMBA),
    "granitehybrid-experts": changed(CONFIGS["granitehybrid-experts"], **EVEN, **MAMBA),
    "falcon-h1": changed(CONFIGS["falcon-h1"], **EVEN, mamba_n_heads=8, mamba_d_head=16, mamba_d_ssm=128),
    "nemotron_h": changed(CONFIGS["nemotron_h"], **EVEN, **NEMOTRON),
    "nemotron_h_moe": changed(CONFIGS["nemotron_h_moe-latents"], **EVEN, **NEMOTRON, moe_latent_size=64),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_answers_as_transformers(name, tmp_path):
    model = save_random_model(CONFIGS[name], tmp_path)
    file = write_gguf(tmp_path, tmp_path / "model.gguf")
    assert generated(file.path) == greedy(model, PROMPT)
    # Where nothing turns queries and keys, answers do not show in which order their heads' numbers are.
    weights, tensors = load_file(tmp_path / "model.safetensors"), GgufTensors(file.path)
    for tensor in weights.keys() & tensors.keys():
        scales = torch.from_numpy(np.asarray(gguf_hybrids.scales(CONFIGS[name].to_dict(), tensor)))
        torch.testing.assert_close(tensors.read(tensor, torch.float32), weights[tensor] * scales)


@pytest.mark.parametrize("name", QUANTISED)
def test_a_quantised_file_answers_as_a_checkpoint_with_its_weights(name, tmp_path):
    """Its sizes are that one's, and matrices that are in blocks stay so, experts' too."""
    save_random_model(QUANTISED[name], tmp_path)
    file = write_gguf(tmp_path, tmp_path / "model.gguf", "Q8_0")
    folder = write_dequantized(tmp_path, file, tmp_path / "dequantized")
    assert generated(file.path) == generated(folder)
    sizes = [ModelConfig.from_pretrained(path) for path in (file.path, folder)]
    assert num_parameters(sizes[0]) == num_parameters(sizes[1])
    assert state_bytes(sizes[0], 2) == state_bytes(sizes[1], 2)
    modules = read_cpu_quantization(file.path)["quantization_config"]["modules"]["Q8_0"]
    stored = [each for each in gguf.GGUFReader(file.path).tensors if each.tensor_type.name == "Q8_0"]
    num_experts = [int(each.shape[2]) if len(each.shape) == 3 else 1 for each in stored]
    assert len(modules) == sum(num_experts) - 1, "all but the embedding"


def without_states(writer: gguf.GGUFWriter) -> None:
    """A layer more than there are tensors for."""
    writer.add_block_count(4)


ODDITIES: dict[str, tuple[str, Callable[[gguf.GGUFWriter], None], str]] = {
    "rotary positions beside Mamba": (
        "granitehybrid",
        lambda writer: writer.add_rope_scaling_finetuned(True),
        r"granitehybrid\.rope\.scaling\.finetuned is True: models of this architecture with rotary positions",
    ),
    "no rotary positions": (
        "granitemoe",
        lambda writer: writer.add_rope_scaling_finetuned(False),
        r"granitemoe\.rope\.scaling\.finetuned is False: models of this architecture without rotary positions",
    ),
    "embeddings": (
        "lfm2",
        lambda writer: writer.add_causal_attention(False),
        r"lfm2\.attention\.causal is False: supported are models that generate text",
    ),
    "experts by softmax": (
        "lfm2moe",
        lambda writer: writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SOFTMAX),
        r"lfm2moe\.expert_gating_func is 1; supported: 2, sigmoids",
    ),
    "logits that nothing scales": (
        "falcon-h1-tied",
        lambda writer: None,
        r"model\.gguf: there is no tensor output\.weight: where the embedding is the head too",
    ),
    "a layer of nothing known": (
        "lfm2",
        without_states,
        r"model\.gguf: layer 3 has none of the tensors that it may be made of: shortconv\.in_proj, attn_q",
    ),
}


@pytest.mark.parametrize("oddity", ODDITIES)
def test_what_is_not_supported_is_refused_by_name(oddity, tmp_path):
    name, change, message = ODDITIES[oddity]
    save_random_model((CONFIGS | TIED)[name], tmp_path)
    write_gguf(tmp_path, tmp_path / "model.gguf", extra=[change])
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_pretrained(tmp_path / "model.gguf")


def test_layers_that_guess_ahead_are_left_out_of_nemotron(tmp_path):
    """They are behind the others, and each field that layers have for themselves has one for them."""
    config = CONFIGS["nemotron_h_moe"]
    model = save_random_model(config, tmp_path)

    def add_guessing(writer: gguf.GGUFWriter) -> None:
        writer.add_block_count(5)
        writer.add_uint32("nemotron_h_moe.nextn_predict_layers", 1)
        writer.add_head_count_kv([0, 0, 0, 2, 2])
        writer.add_feed_forward_length([0, 37, 0, 0, 37])
        for name in ("attn_q.weight", "ffn_gate_inp.weight", "nextn.eh_proj.weight"):
            writer.add_tensor(f"blk.4.{name}", np.zeros((8, 8), np.float32))

    write_gguf(tmp_path, tmp_path / "model.gguf", extra=[add_guessing])
    assert generated(tmp_path / "model.gguf") == greedy(model, PROMPT)
