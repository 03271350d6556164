"""A KV cache in 8-bit floats: a checkpoint's scales on their way to the kernels, and what is done with whole blocks.

The engine itself keeps such a cache on a GPU only; the model computes with one anywhere.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.config import EngineConfig
from headrace.engine.errors import ConfigError, ModelError
from headrace.engine.execution.devices import resolve_kv_cache_dtype
from headrace.engine.kv_cache.kv_memory import KVMemory, block_bytes
from headrace.engine.llm import LLM
from headrace.engine.models import load_model
from headrace.engine.models.attention import Attention
from headrace.kernels.kv_cache.fp8 import FP8_LARGEST, KVScales
from headrace.kernels.paged_attention import AttentionMetadata

from .conftest import save_random_model
from .families import FAMILIES

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn
SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
            "input_activations": {
                "num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True
            },
        }
    },
    "ignore": ["re:.*"],
}  # fmt: skip
ATTENTION = "model.layers.1.self_attn"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of three layers, none of whose weights are quantised."""
    return save(FAMILIES["llama"], tmp_path)


def save(family: Any, folder: Path) -> Path:
    save_random_model(family, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": SCHEME}))
    return folder


def add(folder: Path, scales: dict[str, float]) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"{ATTENTION}.{name}": torch.tensor(scale) for name, scale in scales.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def compute(folder: Path, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The hidden states of 20 tokens, and the cache they are written to."""
    config = ModelConfig.from_pretrained(folder)
    model = load_model(config, EngineConfig(max_model_len=32), torch.float32, CPU)
    memory = KVMemory(config, 2, 16, dtype, CPU)
    metadata = AttentionMetadata([20], [20], [[1, 2]], 16)
    tokens = torch.arange(20)
    return model.forward(tokens + 5, tokens, memory.caches, tokens + 16, metadata), memory.caches[0]


@pytest.mark.parametrize(
    ("scales", "expected"),
    [
        ({}, (1.0, 1.0)),
        ({"kv_scale": 0.25}, (0.25, 0.25)),
        ({"k_scale": 0.5, "v_scale": 4.0}, (0.5, 4.0)),
        ({"k_proj.k_scale": 2.0, "v_proj.v_scale": 0.125}, (2.0, 0.125)),
    ],
    ids=["none", "one", "of attention", "of projections"],
)
def test_a_layers_cache_holds_quotients_by_the_checkpoints_scales(scales, expected, folder):
    add(folder, scales)
    hidden, cache = compute(folder, E4M3)
    exact_hidden, exact = compute(folder, torch.float32)
    # The first layer has no scales; the second's input differs a little already.
    for layer, of_layer in ((0, (1.0, 1.0)), (1, expected)):
        for held, true, scale in zip(cache[:, layer], exact[:, layer], of_layer, strict=True):
            torch.testing.assert_close(held.float() * scale, true, rtol=0.08, atol=0.1 * true.abs().max().item())
    assert not torch.equal(hidden, exact_hidden)
    assert torch.nn.functional.cosine_similarity(hidden, exact_hidden).mean() > 0.97


def test_latents_in_fp8(tmp_path):
    """As they are: no checkpoint has a scale for them."""
    save_random_model(FAMILIES["glm4-moe-lite"], tmp_path)
    (hidden, cache), (exact_hidden, exact) = compute(tmp_path, E4M3), compute(tmp_path, torch.float32)
    assert cache.shape == exact.shape
    torch.testing.assert_close(cache[:, 0].float(), exact[:, 0], rtol=0.08, atol=0.02)
    assert 0.97 < torch.nn.functional.cosine_similarity(hidden, exact_hidden).mean() < 1 - 1e-6


def test_layers_that_read_the_keys_of_another_have_its_scales(tmp_path):
    add(save(FAMILIES["gemma4-small"], tmp_path), {"k_scale": 0.5, "v_scale": 4.0})
    model = load_model(ModelConfig.from_pretrained(tmp_path), EngineConfig(max_model_len=32), torch.float32, CPU)
    scales = [layer.attention._kv_scales for layer in model._layers if isinstance(layer.attention, Attention)]
    # The second layer's keys are those of all that have no window.
    assert scales == [KVScales(), KVScales(0.5, 4.0)] * 3


@pytest.mark.parametrize("scale", [0.0, -1.0])
def test_a_scale_that_is_not_positive_is_refused(scale, folder):
    add(folder, {"k_scale": scale})
    with pytest.raises(
        ModelError, match=rf"tensor {ATTENTION}.k_scale in .* has the value {scale:g}; must be positive"
    ):
        compute(folder, torch.float32)


@pytest.mark.parametrize("dtype", FP8_LARGEST, ids=str)
def test_blocks_in_fp8_are_copied_zeroed_and_swapped(dtype, folder):
    config = ModelConfig.from_pretrained(folder)
    memory = KVMemory(config, 4, 16, dtype, CPU)
    assert memory.block_bytes == block_bytes(config, 16, torch.float32) // 4
    [cache] = memory.caches
    cache.copy_(torch.randn(cache.shape))
    before = cache.float()
    memory.copy([(1, 2)])
    held = memory.swap_out([1, 3])
    memory.zero([1])
    after = cache.float()
    assert torch.equal(after[:, :, 2], before[:, :, 1])
    assert not after[:, :, 1].any()
    memory.swap_in(held, 1, [4])
    assert torch.equal(cache.float()[:, :, 4], before[:, :, 3])


def test_which_dtype_the_cache_has():
    assert resolve_kv_cache_dtype("auto", torch.bfloat16, CPU) == torch.bfloat16
    with pytest.raises(ConfigError, match="kv_cache_dtype fp8_e5m2 needs a CUDA GPU, and the device is cpu: use auto"):
        resolve_kv_cache_dtype("fp8_e5m2", torch.bfloat16, CPU)


@pytest.mark.parametrize(
    ("name", "capability", "expected"),
    [
        ("fp8", (9, 0), E4M3),
        ("fp8_e4m3", (8, 9), E4M3),
        ("fp8_e5m2", (8, 0), torch.float8_e5m2),
        ("fp8", (8, 6), "kv_cache_dtype fp8 needs compute capability 8.9 .* RTX 3090 has 8.6: use fp8_e5m2 or auto"),
    ],
)
def test_which_fp8_a_gpu_has(name, capability, expected, monkeypatch):
    """No GPU is at hand, so what torch would say of one is set."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "RTX 3090")
    if isinstance(expected, torch.dtype):
        assert resolve_kv_cache_dtype(name, torch.bfloat16, torch.device("cuda")) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            resolve_kv_cache_dtype(name, torch.bfloat16, torch.device("cuda"))


def test_an_engine_on_a_cpu_says_so_at_once(folder):
    with pytest.raises(ConfigError, match="kv_cache_dtype fp8 needs a CUDA GPU"):
        LLM(str(folder), device="cpu", kv_cache_dtype="fp8", skip_tokenizer_init=True)
