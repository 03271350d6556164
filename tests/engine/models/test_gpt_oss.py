"""gpt-oss with its experts in MXFP4, its published config, and what is refused; else it is among the families."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM, Mxfp4Config

from headrace.engine.checkpoints.model_config import ModelConfig
from headrace.engine.checkpoints.model_size import kv_token_bytes, num_parameters, weight_bytes
from headrace.engine.config import EngineConfig
from headrace.engine.engine import Engine
from headrace.engine.errors import ConfigError, ModelError
from headrace.engine.models.decoder import Decoder
from headrace.engine.models.gpt_oss import GptOssLayer
from headrace.engine.quantization.mxfp4 import StoredMxfp4
from headrace.engine.request import Request
from headrace.engine.sharding.shares import require_splittable

from ..conftest import NUM_NEW_TOKENS, greedy, save_random_model
from ..families import ODD_SIZES, YARN_ROPE
from ..parallel.sharing import FROM_FILE, logits_of, shared_logits
from ..running import greedy_params, run_all, token_ids

CPU = torch.device("cpu")
PROMPTS = [[(7 * place * place + 3) % 300 for place in range(length)] for length in (1, 30, 61)]
# What the four bits stand for, in the order of the standard's table.
MAGNITUDES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
QUANTIZED = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
# Blocks are of 32 inputs.
SIZES = {**ODD_SIZES, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_attention_heads": 4}
TINY = GptOssConfig(
    **SIZES,
    num_local_experts=5,
    num_experts_per_tok=2,
    sliding_window=21,
    swiglu_limit=3.0,
    rope_parameters={**YARN_ROPE, "truncate": False},
)
# The config.json of openai/gpt-oss-20b.
PUBLISHED: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "pad_token_id": 199999,
    "quantization_config": QUANTIZED,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 201088,
}


def decoded(blocks: Tensor, scales: Tensor) -> Tensor:
    """What a row of blocks stands for, a number at a time: [numbers]."""
    numbers = []
    for block, exponent in zip(blocks.tolist(), scales.tolist(), strict=True):
        for byte in block:
            for nibble in (byte % 16, byte // 16):
                sign = -1.0 if nibble >= 8 else 1.0
                numbers.append(sign * MAGNITUDES[nibble % 8] * 2.0 ** (exponent - 127))
    return torch.tensor(numbers)


def quantized(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Blocks and scales of [experts, out, in], each number as near as there is one."""
    groups = matrices.unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1, keepdim=True).log2().floor() - 2
    distances = ((groups / exponents.exp2()).abs().unsqueeze(-1) - torch.tensor(MAGNITUDES)).abs()
    nibbles = (distances.argmin(-1) + 8 * (groups < 0)).to(torch.uint8)
    blocks = nibbles[..., ::2] | nibbles[..., 1::2] << 4
    return blocks, (exponents.squeeze(-1) + 127).to(torch.uint8)


def quantize(folder: Path) -> None:
    """Put the experts of a checkpoint in MXFP4, as the published ones have them."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        blocks, scales = quantized(tensors.pop(name).transpose(1, 2))
        tensors |= {f"{name}_blocks": blocks.contiguous(), f"{name}_scales": scales.contiguous()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    changed(folder, quantization_config=QUANTIZED)


def changed(folder: Path, **fields: Any) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | fields))


def dequantize(model: GptOssForCausalLM, folder: Path) -> None:
    """Give transformers' model what the checkpoint's blocks stand for."""
    tensors, parameters = load_file(folder / "model.safetensors"), dict(model.named_parameters())
    for name in [name.removesuffix("_blocks") for name in tensors if name.endswith("_blocks")]:
        blocks, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
        experts = [[decoded(*row) for row in zip(*each, strict=True)] for each in zip(blocks, scales, strict=True)]
        matrices = torch.stack([torch.stack(rows) for rows in experts])
        with torch.no_grad():
            parameters[name].copy_(matrices.transpose(1, 2))


def answers(folder: Path, **options: Any) -> list[list[int]]:
    engine = Engine.from_pretrained(
        folder, EngineConfig(num_gpu_blocks_override=100, max_model_len=150, block_size=8, **options)
    )
    requests = [Request(str(index), prompt, greedy_params(NUM_NEW_TOKENS)) for index, prompt in enumerate(PROMPTS)]
    events = run_all(engine, requests)
    return [token_ids(events[request.request_id]) for request in requests]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, GptOssForCausalLM]:
    """A checkpoint in MXFP4, and the model that it stands for."""
    folder = tmp_path_factory.mktemp("mxfp4")
    model = save_random_model(TINY, folder)
    quantize(folder)
    dequantize(model, folder)
    return folder, model


def test_mxfp4_answers_as_transformers_does_with_what_it_stands_for(packed):
    folder, model = packed
    expected = [greedy(model, prompt) for prompt in PROMPTS]
    assert all(len(set(answer)) > 10 for answer in expected)
    assert answers(folder) == expected
    assert answers(folder, max_num_batched_tokens=13, async_scheduling=True) == expected


def test_mxfp4_is_read_as_transformers_reads_it(packed):
    """By its own loader, which knows the published checkpoints: in bfloat16, which has every such number."""
    folder = packed[0]
    loaded = GptOssForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    theirs = dict(loaded.named_parameters())
    ours = filled(packed[0], torch.bfloat16)
    assert len(ours) == 6
    for name, matrices in ours.items():
        assert torch.equal(matrices, theirs[name].transpose(1, 2)), name


def filled(folder: Path, dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    """Experts' matrices by their names, [experts, out, in], dequantised."""
    config = ModelConfig.from_pretrained(folder)
    model = Decoder(config, 1, GptOssLayer, dtype, CPU)
    model.draw(seed=3) if options else model.load()
    mixtures = [layer.mixture for layer in model._layers]
    assert all(mixtures)
    return {
        f"model.layers.{index}.mlp.experts.{name}_proj": torch.stack(
            [getattr(each, name).held.read().dequantized(dtype) for each in mixture.experts]
        )
        for index, mixture in enumerate(mixtures)
        for name in ("gate_up", "down")
    }


def test_a_stage_of_a_pipeline_reads_its_own_layers(packed):
    config = ModelConfig.from_pretrained(packed[0])
    alone = FROM_FILE.load(config)
    alone.prepack()
    assert torch.allclose(shared_logits(config, 1, FROM_FILE, num_stages=2), logits_of(alone), rtol=0, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_byte_of_mxfp4(dtype):
    """All values under scales that are far apart, against an obvious decoder: two experts of three outputs."""
    generator = torch.Generator().manual_seed(4)
    blocks = torch.randint(0, 256, (2, 3, 4, 16), generator=generator, dtype=torch.uint8)
    blocks[0, 0] = torch.arange(64, dtype=torch.uint8).view(4, 16) * 4 + 3
    exponents = (118, 127, 134) if dtype == torch.float16 else (10, 127, 244)
    scales = torch.tensor(exponents, dtype=torch.uint8).view(1, 3, 1).expand(2, 3, 4).clone()
    scales[..., 1] -= 3
    for expert in range(2):
        weights = StoredMxfp4(blocks[expert], scales[expert], dtype, CPU).read().dequantized(dtype)
        for output in range(3):
            expected = decoded(blocks[expert, output], scales[expert, output])
            assert torch.equal(weights[output].float(), expected)


@pytest.mark.parametrize(
    ("suffix", "tensor", "message"),
    [
        ("blocks", torch.zeros(5, 192, 2, 8, dtype=torch.uint8), r"has shape \(5, 192, 2, 8\).* \(5, 192, 2, 16\)"),
        ("scales", torch.zeros(5, 192, 1, dtype=torch.uint8), r"has shape \(5, 192, 1\).* \(5, 192, 2\)"),
        ("scales", torch.zeros(5, 192, 2), r"has dtype float32; .*asks for uint8"),
    ],
)
def test_blocks_and_scales_that_do_not_fit_are_named(packed, tmp_path, suffix, tensor, message):
    name = f"model.layers.1.mlp.experts.gate_up_proj_{suffix}"
    tensors = load_file(packed[0] / "model.safetensors")
    save_file(tensors | {name: tensor}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((packed[0] / "config.json").read_text())
    with pytest.raises(ModelError, match=rf"tensor {name} .*{message}"):
        answers(tmp_path)


def test_the_published_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [200002, 199999, 200012]}))
    config = ModelConfig.from_pretrained(tmp_path)
    assert config.sliding_windows == (128, None) * 12
    assert config.eos_token_ids == (200002, 199999, 200012)
    assert config.max_position_embeddings == 131072
    assert (config.qkv_bias, config.output_bias, config.attention_scale) == (True, True, 0.125)
    rope = config.ropes[0]
    assert (rope.rope_type, rope.theta, rope.factor, rope.truncate) == ("yarn", 150000.0, 32.0, False)
    assert rope.attention_factor == pytest.approx(1.3465735902799727)
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.num_experts_per_tok) == (32, 4)
    assert num_parameters(config) == 20_914_757_184
    experts = 24 * 32 * 3 * 2880 * 2880
    # Four bits, and sixteen for each 32 of them.
    assert weight_bytes(config, 2) == experts // 2 + experts // 16 + 2 * (num_parameters(config) - experts)
    assert kv_token_bytes(config, 2) == 2 * 24 * 8 * 64 * 2


def test_random_weights_of_a_published_checkpoint_are_as_large_as_others(packed):
    """But for what a power of two leaves."""
    drawn = filled(packed[0], torch.float32, load_format="dummy")
    for name, num_inputs in (("gate_up", 64), ("down", 96)):
        spread = drawn[f"model.layers.0.mlp.experts.{name}_proj"].std() * num_inputs**0.5
        assert 0.7 < spread < 1.42


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method is 'fp8'; supported for gpt-oss: mxfp4"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"intermediate_size": 100}, "intermediate_size 100 is no multiple of 32"),
        ({"num_local_experts": 1}, "num_experts_per_tok is 4 of 1 experts"),
        ({"architectures": ["MixtralForCausalLM"]}, r"quantization_config \(mxfp4\) is supported for gpt-oss alone"),
    ],
)
def test_configs_that_cannot_be_served(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | changes))
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_pretrained(tmp_path)


def test_it_cannot_be_shared_nor_rounded(packed):
    config = ModelConfig.from_pretrained(packed[0])
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 is not supported for models like .* \(gpt-oss\)"):
        require_splittable(replace(config, quantization=None), 2)
    with pytest.raises(ConfigError, match=r"the checkpoint's are quantised \(mxfp4\)"):
        answers(packed[0], quantization="int8")
