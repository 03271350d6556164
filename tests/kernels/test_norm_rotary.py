"""RMSNorm and rotary positions against transformers' own modules."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from headrace.engine.checkpoints.rope_config import RopeConfig, read_rope
from headrace.engine.models.rope import rotary_factors
from headrace.kernels.kv_cache import PADDING_SLOT
from headrace.kernels.norm_rotary import add_rms_norm, apply_rotary, rms_norm, rotate_and_write
from headrace.kernels.norm_rotary.reference import rms_norm_reference, rotate_and_write_reference

from .tolerances import DTYPES, TOLERANCES, assert_close

pytestmark = pytest.mark.usefixtures("_nan_filled_outputs")

CONTEXT = 512
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 8.0},
    "yarn-untruncated": {"rope_type": "yarn", "factor": 8.0, "beta_fast": 16, "beta_slow": 2, "truncate": False},
    "longrope": {"rope_type": "longrope", "factor": 8.0},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 72), (13, 101), (5, 3, 20)], ids=str)
def test_rms_norm(shape, dtype):
    norm = LlamaRMSNorm(shape[-1], eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight, mean=1.0)
    x = torch.randn(shape).to(dtype) * 3
    assert_close(rms_norm(x, norm.weight, 1e-5), norm(x))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_with_float32_weights_rounds_once(dtype):
    """As Gemma has it, whose weights are stored with one taken off."""
    norm = Gemma2RMSNorm(72, eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight, std=0.01)
    x = torch.randn(13, 72).to(dtype) * 3
    normed, expected = rms_norm(x, norm.weight.float() + 1, 1e-5), norm(x)
    # In float32 there is nothing to be rounded twice, only sums in another order.
    assert torch.equal(normed, expected) if dtype == torch.bfloat16 else (normed - expected).abs().max() < 2e-6


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 72), (13, 101), (5, 576)], ids=str)
def test_add_rms_norm(shape, dtype):
    weight = torch.randn(shape[-1]).to(dtype)
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    expected_residual = residual + x
    normed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, expected_residual)
    assert_close(normed, rms_norm_reference(expected_residual, weight, 1e-5))


def test_rms_norm_of_zeros_is_zero():
    assert not rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 20, 64, 128])
@pytest.mark.parametrize("name", ROPES)
def test_rotary(name, head_dim, dtype):
    rope = {**ROPES[name], "rope_theta": 5e5, "original_max_position_embeddings": 64}
    if name == "longrope":
        factors = torch.linspace(1, 9, head_dim // 2)
        rope |= {"short_factor": factors.sqrt().tolist(), "long_factor": factors.tolist()}
    positions = torch.tensor([0, 1, 5, 63, 64, 300, 511])
    query, key = torch.randn(7, 6, head_dim).to(dtype), torch.randn(7, 2, head_dim).to(dtype)
    config = LlamaConfig(
        hidden_size=6 * head_dim,
        num_attention_heads=6,
        head_dim=head_dim,
        max_position_embeddings=CONTEXT,
        rope_parameters=dict(rope),
    )
    cos, sin = LlamaRotaryEmbedding(config)(query, positions.unsqueeze(0))
    expected = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
    ours = read_rope(rope, 1.0, {"max_position_embeddings": CONTEXT})
    our_cos, our_sin = rotary_factors(ours, head_dim, CONTEXT)[:, positions].to(dtype)
    for x, rotated in zip((query, key), expected, strict=True):
        assert_close(apply_rotary(x, our_cos, our_sin), rotated[0].transpose(0, 1))


def test_rotation_keeps_lengths_and_leaves_position_zero_alone():
    x = torch.randn(2, 3, 16)
    cos, sin = rotary_factors(RopeConfig(10000.0), 16, 10)[:, [0, 9]]
    rotated = apply_rotary(x, cos, sin)
    assert torch.equal(rotated[0], x[0])
    assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
    assert not torch.allclose(rotated[1], x[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", ["no-norms", "norms", "float32-norms"])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim", "rotary_dim"),
    [(1, 9, 3, 64, 64), (5, 4, 4, 20, 20), (7, 3, 1, 80, 32), (2, 2, 2, 128, 100), (0, 2, 1, 16, 16)],
    ids=["decode", "odd-head", "partial", "partial-odd", "nothing"],
)
def test_rotate_and_write(tokens, heads, kv_heads, head_dim, rotary_dim, norms, dtype):
    """Against the reference: queries, and what is written where. Untouched slots stay NaN."""
    generator = torch.Generator().manual_seed(head_dim)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    # Part of a wider tensor: rows need not lie next to each other.
    qkv = draw(tokens, (heads + 2 * kv_heads) * head_dim + 3)[:, :-3]
    cos, sin = draw(2, tokens, rotary_dim // 2)
    slots = torch.randperm(24, generator=generator)[:tokens]
    # Every third token is padding.
    slots[2::3] = PADDING_SLOT
    query_norm, key_norm = draw(2, head_dim) if norms != "no-norms" else (None, None)
    if norms == "float32-norms":
        query_norm, key_norm = (1 + torch.randn(head_dim) * 0.1 for _ in range(2))
    caches, expected_caches = torch.full((2, 2, 6, 4, kv_heads, head_dim), torch.nan).to(dtype)
    queries = rotate_and_write(qkv, cos, sin, caches[0], caches[1], slots, query_norm, key_norm, 1e-5)
    expected = rotate_and_write_reference(
        qkv.contiguous(), cos, sin, expected_caches[0], expected_caches[1], slots, query_norm, key_norm, 1e-5
    )
    assert_close(queries, expected)
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(caches, expected_caches, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_what_lies_beyond_the_rotary_dimensions_is_not_turned():
    x = torch.randn(3, 2, 10)
    cos, sin = torch.zeros(3, 2), torch.ones(3, 2)
    rotated = apply_rotary(x, cos, sin)
    assert torch.equal(rotated[..., 4:], x[..., 4:])
    assert torch.equal(rotated[..., :4], torch.cat([-x[..., 2:4], x[..., :2]], dim=-1))
