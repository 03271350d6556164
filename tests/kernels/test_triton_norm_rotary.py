"""RMSNorm and rotary positions on the GPU against the obvious torch."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

from headrace.kernels.kv_cache import PADDING_SLOT
from headrace.kernels.linear import RowFormat
from headrace.kernels.linear.triton import quantize_rows_triton
from headrace.kernels.norm_rotary.reference import (
    rms_norm_reference,
    rotate_and_write_latents_reference,
    rotate_and_write_reference,
)
from headrace.kernels.norm_rotary.triton import (
    add_rms_norm_quantized_triton,
    add_rms_norm_triton,
    rms_norm_triton,
    rotate_and_write_latents_triton,
    rotate_and_write_triton,
)
from headrace.kernels.triton_norms import MAX_NORM_SIZE

from .latent_cases import latents_of
from .tolerances import TOLERANCES, assert_close

pytestmark = pytest.mark.usefixtures("_nan_filled_outputs")


@pytest.mark.parametrize("shape", [(1, 72), (13, 101), (5, 3, 20), (3, 4096), (0, 8)], ids=str)
def test_rms_norm(shape, triton_dtype, device):
    x, weight = (torch.randn(size, device=device).to(triton_dtype) for size in (shape, shape[-1:]))
    for factors in (weight, weight.float() + 1e-4):
        assert_close(rms_norm_triton(x * 3, factors, 1e-5), rms_norm_reference(x * 3, factors, 1e-5))


def test_rms_norm_of_zeros_is_zero(device):
    assert not rms_norm_triton(torch.zeros(2, 8, device=device), torch.ones(8, device=device), 1e-6).any()


@pytest.mark.parametrize("shape", [(1, 72), (13, 101), (5, 576)], ids=str)
def test_add_rms_norm(shape, triton_dtype, device):
    """On parts of wider tensors, whose rows do not lie next to each other."""
    rows, size = shape
    weight = torch.randn(size, device=device).to(triton_dtype)
    x, residual = (torch.randn(rows, size + 3, device=device).to(triton_dtype)[:, :size] for _ in range(2))
    before, expected_residual = x.clone(), residual + x
    normed = add_rms_norm_triton(x, residual, weight, 1e-5)
    assert torch.equal(residual, expected_residual)
    assert torch.equal(x, before)
    assert_close(normed, rms_norm_reference(expected_residual, weight, 1e-5))


@pytest.mark.parametrize("byte_dtype", [torch.int8, torch.float8_e4m3fn], ids=["int8", "fp8"])
@pytest.mark.parametrize(("shape", "group_size"), [((1, 72), 24), ((13, 101), 9999), ((5, 576), 128)], ids=str)
def test_a_norm_whose_rows_are_quantised(shape, group_size, byte_dtype, triton_dtype, device):
    """As in two steps, but for the order of sums: few numbers are another by a step."""
    rows, size = shape
    weight = torch.randn(size, device=device).to(triton_dtype)
    x, residual = (torch.randn(rows, size + more, device=device).to(triton_dtype)[:, :size] for more in (3, 5))
    before, expected_residual = x.clone(), residual + x
    expected = quantize_rows_triton(rms_norm_triton(expected_residual, weight, 1e-5), byte_dtype, group_size)
    found = add_rms_norm_quantized_triton(x, residual, weight, 1e-5, RowFormat(byte_dtype, group_size))
    assert torch.equal(residual, expected_residual)
    assert torch.equal(x, before)
    assert found.dtype == triton_dtype
    assert_close(found.scales, expected[1])
    values, wanted = found.values.float(), expected[0].float()
    assert ((values - wanted).abs() <= (1 if byte_dtype == torch.int8 else wanted.abs() / 8)).all()
    assert (values == wanted).float().mean() > 0.99


@pytest.mark.parametrize(
    ("tokens", "heads", "size", "rotary_dim"),
    [(3, 20, 512, 64), (1, 16, 512, 64), (7, 70, 80, 16), (5, 5, 36, 6), (0, 2, 16, 2)],
    ids=["glm", "decode", "many-heads", "odd", "nothing"],
)
def test_latents(tokens, heads, size, rotary_dim, triton_dtype, device):
    """Untouched parts of queries and slots stay NaN."""
    given = latents_of(tokens, heads, size, rotary_dim, device)
    given = {name: each.to(triton_dtype) if each.is_floating_point() else each for name, each in given.items()}
    expected = {**given, "queries": given["queries"].clone(), "cache": given["cache"].clone()}
    rotate_and_write_latents_triton(**given, eps=1e-5)
    rotate_and_write_latents_reference(**expected, eps=1e-5)
    for name in ("queries", "cache"):
        tolerance = TOLERANCES[triton_dtype]
        torch.testing.assert_close(given[name], expected[name], rtol=tolerance, atol=tolerance, equal_nan=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latents": torch.zeros(3, 41)}, r"latents \(3, 41\) must have the shape \[3, 42\]"),
        ({"cos": torch.zeros(3, 4)}, r"cos \(3, 4\) must have the shape \[3, 3\]"),
        ({"cache": torch.zeros(3, 16, 2, 42)}, r"cache \(.*\) must have the shape \[any, any, 1, 42\]"),
        ({"queries": torch.zeros(3, 5, 42).half()}, r"queries \(3, 5, 42\) is float16, and must be float32"),
    ],
)
def test_latents_that_do_not_fit_are_named(changes, message, device):
    given = latents_of(3, 5, 36, 6, device) | {name: each.to(device) for name, each in changes.items()}
    with pytest.raises(ValueError, match=message):
        rotate_and_write_latents_triton(**given, eps=1e-5)


@pytest.mark.parametrize("norm_dtype", [None, "same", "float32"])
@pytest.mark.parametrize(
    ("tokens", "heads", "kv_heads", "head_dim", "rotary_dim"),
    [
        (1, 9, 3, 64, 64),
        (5, 4, 4, 20, 20),
        (7, 3, 1, 80, 32),
        (2, 2, 2, 128, 100),
        (3, 16, 2, 96, 96),
        (2, 4, 2, 256, 256),
        (0, 2, 1, 16, 16),
    ],
    ids=["decode", "odd-head", "partial", "partial-odd", "many-heads", "long-head", "nothing"],
)
def test_rotate_and_write(tokens, heads, kv_heads, head_dim, rotary_dim, norm_dtype, triton_dtype, device):
    """Queries, and what is written where. Untouched slots stay NaN."""
    generator = torch.Generator().manual_seed(head_dim)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, triton_dtype)

    # Part of a wider tensor: rows need not lie next to each other.
    qkv = draw(tokens, (heads + 2 * kv_heads) * head_dim + 3)[:, :-3]
    cos, sin = draw(2, tokens, rotary_dim // 2)
    slots = torch.randperm(24, generator=generator)[:tokens].to(device)
    # Every third token is padding.
    slots[2::3] = PADDING_SLOT
    query_norm = key_norm = None
    if norm_dtype is not None:
        query_norm, key_norm = draw(2, head_dim).to(torch.float32 if norm_dtype == "float32" else triton_dtype)
    empty = torch.full((2, 2, 6, 4, kv_heads, head_dim), torch.nan, device=device).to(triton_dtype)
    caches, expected_caches = empty[0], empty[1]
    queries = rotate_and_write_triton(qkv, cos, sin, caches[0], caches[1], slots, query_norm, key_norm, 1e-5)
    expected = rotate_and_write_reference(
        qkv.contiguous(), cos, sin, expected_caches[0], expected_caches[1], slots, query_norm, key_norm, 1e-5
    )
    assert_close(queries, expected)
    tolerance = TOLERANCES[triton_dtype]
    torch.testing.assert_close(caches, expected_caches, rtol=tolerance, atol=tolerance, equal_nan=True)


NORM_ERRORS = {
    "weight": (lambda x: (x, x[0, :5], 1e-5), r"weight \(5,\) must have the shape \[8\]"),
    "dtype": (lambda x: (x.double(), x[0], 1e-5), r"x \(2, 8\) is float64, and must be float32 or"),
    "mixed": (lambda x: (x, x[0].half(), 1e-5), r"weight \(8,\) is float16, and must be float32"),
    "device": (lambda x: (x, x[0].to("meta"), 1e-5), r"weight \(8,\) is on meta"),
    "stride": (lambda x: (x, x[:, :1].expand(2, 8)[0], 1e-5), r"weight \(8,\) must be contiguous"),
    "size": (lambda x: (x[:, :1].expand(2, MAX_NORM_SIZE + 1).contiguous(), x[0], 1e-5), "must have the shape"),
}


@pytest.mark.parametrize(("arguments", "message"), NORM_ERRORS.values(), ids=NORM_ERRORS)
def test_norm_arguments_that_do_not_fit_are_named(arguments, message, device):
    with pytest.raises(ValueError, match=message):
        rms_norm_triton(*arguments(torch.ones(2, 8, device=device)))


def test_rows_that_fit_no_program_are_refused(device):
    x = torch.ones(1, MAX_NORM_SIZE + 1, device=device)
    with pytest.raises(ValueError, match=r"x \(1, 65537\) has rows of 65537 numbers; at most 65536"):
        rms_norm_triton(x, x[0], 1e-5)


def test_a_residual_of_another_shape_is_named(device):
    x = torch.ones(2, 8, device=device)
    with pytest.raises(ValueError, match=r"residual \(1, 8\) must have the shape \[2, 8\]"):
        add_rms_norm_triton(x, x[:1], x[0], 1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"qkv": torch.zeros(3, 70)}, r"qkv \(3, 70\) must have columns for at least one query head, 1 key heads"),
        ({"qkv": torch.zeros(3, 32)}, r"qkv \(3, 32\) must have columns"),
        ({"cos": torch.zeros(2, 8)}, r"cos \(2, 8\) must have the shape \[3, any\]"),
        ({"cos": torch.zeros(3, 9), "sin": torch.zeros(3, 9)}, r"cos \(3, 9\) must have at most half"),
        ({"sin": torch.zeros(3, 7)}, r"sin \(3, 7\) must have the shape \[3, 8\]"),
        ({"key_cache": torch.zeros(4, 4, 1, 16).half()}, r"key_cache .* is float16"),
        ({"value_cache": torch.zeros(4, 1, 4, 16).transpose(1, 2)}, r"value_cache .* has strides"),
        ({"slots": torch.zeros(3, dtype=torch.int32)}, r"slots \(3,\) is int32, and must be int64"),
        ({"query_norm": torch.zeros(16)}, "both or neither"),
        ({"query_norm": torch.zeros(16), "key_norm": torch.zeros(8)}, r"key_norm \(8,\) must have the shape \[16\]"),
    ],
)
def test_rotary_arguments_that_do_not_fit_are_named(changes, message, device):
    key_cache, value_cache = torch.full((2, 4, 4, 1, 16), torch.nan, device=device)
    arguments = {
        "qkv": torch.zeros(3, 48),
        "cos": torch.zeros(3, 8),
        "sin": torch.zeros(3, 8),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "slots": torch.arange(3),
        **changes,
    }
    with pytest.raises(ValueError, match=message):
        rotate_and_write_triton(**{name: tensor.to(device) for name, tensor in arguments.items()})
    assert bool(key_cache.isnan().all())
