"""LayerNorm against its formula in float64."""

import torch

from headrace.kernels.layer_norm import add_layer_norm, layer_norm


def test_the_formula():
    generator = torch.Generator().manual_seed(1)
    x, residual = torch.randn(2, 7, 33, generator=generator) * 3 + 5
    weight, bias = torch.randn(2, 33, generator=generator)
    before = residual.clone()
    stream = (before + x).double()
    centred = stream - stream.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    expected = (centred / (variance + 1e-5).sqrt() * weight + bias).float()
    torch.testing.assert_close(add_layer_norm(x, residual, weight, bias, 1e-5), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(residual, before + x)
    torch.testing.assert_close(layer_norm(residual, weight, bias, 1e-5), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(residual, before + x)


def test_the_stream_is_rounded_before_it_is_normalised():
    x, residual = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(2)).bfloat16()
    weight, bias = torch.ones(64).bfloat16(), torch.zeros(64).bfloat16()
    expected = layer_norm((x + residual).float(), weight.float(), bias.float(), 1e-5)
    assert torch.equal(add_layer_norm(x, residual, weight, bias, 1e-5), expected.bfloat16())


def test_a_large_mean_does_not_hide_the_variance():
    x = 4096 + torch.arange(8.0).unsqueeze(0)
    weight, bias = torch.ones(8), torch.zeros(8)
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-5), layer_norm(x - 4096, weight, bias, 1e-5))
