"""Which shapes attention's kernel has on GPUs with more shared memory and with less."""

from dataclasses import replace

import pytest
import torch

from headrace.kernels.device import RESERVED_SHARED_BYTES, UnsupportedGpuError
from headrace.kernels.paged_attention import attention_shape
from headrace.kernels.paged_attention.attention_shape import AttentionShape
from headrace.kernels.paged_attention.kernel_shapes import (
    KernelShape,
    KernelShapes,
    choose_kernels,
    choose_latent_kernels,
)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
HOPPER, A100, ADA = 227 * 1024, 163 * 1024, 99 * 1024


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(
    ("head_dims", "narrow", "wide"),
    [
        ((16, 64), KernelShape(16, 32, 1, 5, 8, 255), KernelShape(128, 128, 8, 5, 1, 255)),
        ((80, 96, 128), KernelShape(16, 16, 1, 3, 8, 255), KernelShape(128, 128, 8, 5, 1, 255)),
        ((160, 256), KernelShape(16, 32, 2, 3, 4, 255), KernelShape(128, 64, 8, 3, 1, 255)),
    ],
)
def test_hoppers_are_those_that_were_the_fastest(head_dims, narrow, wide, dtype):
    for head_dim in head_dims:
        assert choose_kernels(4, head_dim, dtype, HOPPER) == KernelShapes(narrow, wide)


def test_over_fp8_a_narrow_tile_may_have_more_keys_and_all_else_is_equal():
    """A plan is made without knowing the cache's dtype."""
    plain, over_fp8 = (choose_kernels(7, 128, BF16, HOPPER, reads_fp8) for reads_fp8 in (False, True))
    assert over_fp8 == replace(plain, narrow=replace(plain.narrow, tile=32, num_stages=5))
    assert over_fp8.narrow.tile <= plain.wide.tile
    # Twice the rows would not leave one warp enough registers.
    assert choose_kernels(32, 128, BF16, HOPPER, reads_fp8=True) == choose_kernels(32, 128, BF16, HOPPER)


def test_hoppers_for_float32():
    narrow, wide = KernelShape(16, 32, 4, 5, 2, 255), KernelShape(32, 32, 4, 5, 1, 255)
    for head_dim in (64, 256):
        assert choose_kernels(1, head_dim, F32, HOPPER) == KernelShapes(narrow, wide)


@pytest.mark.parametrize("shared", [HOPPER, A100, ADA], ids=["Hopper", "A100", "Ada"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("head_dim", [320, 512])
def test_larger_heads(head_dim, dtype, shared):
    """Of as many registers as latents have, and no more rows where there are few in float32."""
    for group in (1, 8, 16):
        kernels = choose_kernels(group, head_dim, dtype, shared)
        assert kernels.wide.rows == (16 if dtype == F32 else 32)
        for shape in (kernels.narrow, kernels.wide):
            assert group <= shape.rows
            assert shape.shared_bytes(head_dim, dtype) <= shared
        # Over a cache in 8 bits a plan is the same.
        assert kernels == choose_kernels(group, head_dim, dtype, shared, reads_fp8=True)


@pytest.mark.parametrize("shared", [A100, ADA], ids=["A100", "Ada"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_a_processor_has_room_for_its_programs(head_dim, dtype, shared):
    for group in (1, 4, 7, 16):
        kernels = choose_kernels(group, head_dim, dtype, shared)
        for shape in (kernels.narrow, kernels.wide):
            assert shape.rows >= group
            needed = shape.shared_bytes(head_dim, dtype) + RESERVED_SHARED_BYTES
            assert shape.programs_per_processor * needed <= shared + RESERVED_SHARED_BYTES


@pytest.mark.parametrize("shared", [HOPPER, A100, ADA], ids=["Hopper", "A100", "Ada"])
@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=str)
def test_latents(dtype, shared, monkeypatch):
    """More heads than there are rows for are taken in parts."""
    monkeypatch.setattr(attention_shape, "shared_bytes", lambda device: shared)
    for num_heads in (1, 20, 128):
        chosen = AttentionShape.of_latents(num_heads, 512, 64, dtype, torch.device("cpu"))
        assert num_heads == chosen.group * chosen.num_kv_heads
        kernels = choose_latent_kernels(chosen.group, 512, 64, dtype, shared)
        assert chosen.group <= kernels.narrow.rows <= kernels.wide.rows
        for shape in (kernels.narrow, kernels.wide):
            assert shape.shared_bytes(512, dtype, 64) <= shared


def test_a_gpu_that_has_not_enough_for_any():
    with pytest.raises(UnsupportedGpuError, match=r"float32 with heads of 256 needs .* the GPU has 99 KiB .* dtype=bf"):
        choose_kernels(71, 256, F32, ADA)
    with pytest.raises(UnsupportedGpuError, match="device=cpu"):
        choose_kernels(71, 256, BF16, ADA)
