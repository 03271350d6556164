"""When attention for many queries is the kernel that is written for Hopper."""

import math

import pytest
import torch

triton = pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

from headrace.kernels.paged_attention import hopper
from headrace.kernels.paged_attention.attention_shape import AttentionShape
from headrace.kernels.paged_attention.hopper import takes_hopper_kernel

BF16, F16, F32, FP8 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
CUDA = torch.device("cuda")


@pytest.fixture
def of_capability(monkeypatch):
    def be(capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        hopper.hopper_kernel.cache_clear()

    yield be
    hopper.hopper_kernel.cache_clear()


@pytest.fixture
def hopper_is_there(monkeypatch):
    monkeypatch.setattr(hopper, "hopper_kernel", lambda device: object())


def is_taken(heads, kv_heads, head_dim, dtype=BF16, kv_dtype=None, key_rest=0, offsets=(0, 0)):
    """offsets: of keys and values, in numbers, from an aligned address."""
    query = torch.empty(3, heads, head_dim + key_rest, dtype=dtype)
    shape = 2, 16, kv_heads, head_dim + key_rest
    held = [torch.empty(math.prod(shape) + offset, dtype=kv_dtype or dtype)[offset:] for offset in offsets]
    keys, values = (each.view(shape) for each in held)
    of_model = AttentionShape(heads, kv_heads, head_dim, dtype, key_rest=key_rest)
    return takes_hopper_kernel(query, keys, values, of_model, of_model.kernels(query.device).wide)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_have_none(capability, of_capability):
    of_capability(capability)
    assert hopper.hopper_kernel(CUDA) is None


def test_a_hopper_has_it_with_a_triton_whose_gluon_it_is_written_in(of_capability, monkeypatch):
    of_capability((9, 0))
    assert hopper.hopper_kernel(CUDA).fn.__name__ == "attend_hopper_kernel"
    for version, has_it in (("3.5.1", False), ("3.6.0", True), ("3.10.0+git", True), ("4.0.0", True)):
        hopper.hopper_kernel.cache_clear()
        monkeypatch.setattr(triton, "__version__", version)
        assert (hopper.hopper_kernel(CUDA) is not None) is has_it


@pytest.mark.parametrize(
    "shape",
    [
        (32, 8, 128, BF16),
        (32, 8, 128, F16),
        (14, 2, 64),
        (8, 1, 80),
        (4, 4, 16),
        (32, 8, 128, BF16, FP8),
        (128, 1, 64),
        (8, 2, 256),
        (6, 2, 192),
    ],
    ids=str,
)
def test_what_it_takes(shape, hopper_is_there):
    assert is_taken(*shape)


@pytest.mark.parametrize(
    "shape",
    [
        (32, 8, 128, F32),
        (8, 2, 256, BF16, FP8),
        (32, 4, 512),
        (8, 4, 20),
        (8, 1, 72),
        (20, 1, 512, BF16, None, 64),
        (160, 1, 64),
    ],
    ids=[
        "float32",
        "large heads from FP8",
        "larger heads",
        "20 numbers",
        "72 numbers",
        "latents",
        "more rows than it has",
    ],
)
def test_what_is_the_other_kernels(shape, hopper_is_there):
    assert not is_taken(*shape)


def test_copies_of_16_bytes_want_their_places_aligned(hopper_is_there):
    assert is_taken(8, 2, 64, offsets=(16, 32))
    assert not is_taken(8, 2, 64, offsets=(1, 0))
    assert not is_taken(8, 2, 64, offsets=(0, 1))


def test_elsewhere_nothing_is_taken(of_capability):
    of_capability((8, 0))
    assert not is_taken(32, 8, 128)
