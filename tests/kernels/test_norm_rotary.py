"""RMSNorm and rotary positions against transformers' own modules."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from headrace.engine.config import RopeConfig
from headrace.engine.models.rope import inverse_frequencies
from headrace.kernels.norm_rotary import add_rms_norm, apply_rotary, rms_norm, rotary_table
from headrace.kernels.norm_rotary.reference import rms_norm_reference

from .tolerances import DTYPES, assert_close

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES = {
    "default": (RopeConfig(10000.0), {"rope_type": "default", "rope_theta": 10000.0}),
    "linear": (RopeConfig(5e5, "linear", 4.0), {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}),
    "llama3": (RopeConfig(5e5, "llama3", **LLAMA3), {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 72), (13, 101), (5, 3, 20)], ids=str)
def test_rms_norm(shape, dtype):
    norm = LlamaRMSNorm(shape[-1], eps=1e-5).to(dtype)
    torch.nn.init.normal_(norm.weight, mean=1.0)
    x = torch.randn(shape).to(dtype) * 3
    assert_close(rms_norm(x, norm.weight, 1e-5), norm(x))


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
    ours, theirs = ROPES[name]
    positions = torch.tensor([0, 1, 5, 63, 64, 300, 511])
    query, key = torch.randn(7, 6, head_dim).to(dtype), torch.randn(7, 2, head_dim).to(dtype)
    config = LlamaConfig(
        hidden_size=6 * head_dim,
        num_attention_heads=6,
        head_dim=head_dim,
        max_position_embeddings=512,
        rope_parameters=theirs,
    )
    cos, sin = LlamaRotaryEmbedding(config)(query, positions.unsqueeze(0))
    expected = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)
    our_cos, our_sin = rotary_table(inverse_frequencies(ours, head_dim), 512)[:, positions].to(dtype)
    for x, rotated in zip((query, key), expected, strict=True):
        assert_close(apply_rotary(x, our_cos, our_sin), rotated[0].transpose(0, 1))


def test_rotation_keeps_lengths_and_leaves_position_zero_alone():
    x = torch.randn(2, 3, 16)
    cos, sin = rotary_table(inverse_frequencies(RopeConfig(10000.0), 16), 10)[:, [0, 9]]
    rotated = apply_rotary(x, cos, sin)
    assert torch.equal(rotated[0], x[0])
    assert_close(rotated.norm(dim=-1), x.norm(dim=-1))
    assert not torch.allclose(rotated[1], x[1])
