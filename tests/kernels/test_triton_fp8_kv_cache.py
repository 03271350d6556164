"""The GPU's kernels over a KV cache in 8-bit floats, against the reference."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

from headrace.kernels.kv_cache.fp8 import FP8_LARGEST
from headrace.kernels.norm_rotary.reference import rotate_and_write_latents_reference, rotate_and_write_reference
from headrace.kernels.norm_rotary.triton import rotate_and_write_latents_triton, rotate_and_write_triton
from headrace.kernels.paged_attention import paged_attention_reference
from headrace.kernels.paged_attention.attention_shape import AttentionShape
from headrace.kernels.paged_attention.device_plan import DevicePlan
from headrace.kernels.paged_attention.planning import plan_attention
from headrace.kernels.paged_attention.reference import paged_attention_with_lse
from headrace.kernels.paged_attention.triton import attend_planned, has_pairs, paged_attention_triton

from .attention_cases import MIXED, Case, Shape
from .fp8_cases import FORMATS, SCALES, in_fp8, representable, with_nan_beyond
from .latent_cases import latents_of
from .shared_prefix_cases import BATCHES, build, tensors
from .tolerances import assert_close

# What the interpreter says of what is not a number.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]
BATCH_OF_ITEMS = {
    "mixed": (MIXED, None),
    "window": (MIXED, 13),
    "split": (Shape((1, 3), (900, 300), head_dim=64), None),
    "odd heads": (Shape((1, 2), (40, 17), head_dim=17), None),
    "padded heads": (Shape((1, 2), (40, 17), head_dim=24, block_size=8), None),
    "long blocks": (Shape((1, 2), (150, 17), head_dim=16, block_size=128), None),
    "latents": (Shape((1, 1, 9), (17, 90, 20), 5, 1, 80, value_dim=64), None),
    "wide": (Shape((3, 64), (35, 65), 8, 1, 128, 32), None),
}


@FORMATS
@pytest.mark.parametrize(("shape", "sliding_window"), BATCH_OF_ITEMS.values(), ids=BATCH_OF_ITEMS)
def test_attention(shape, sliding_window, dtype, triton_dtype, device):
    case = with_nan_beyond(in_fp8(Case.build(shape, triton_dtype, device), dtype))
    given = (case.query, case.key_cache, case.value_cache, case.metadata, case.scale, sliding_window, None, SCALES)
    assert_close(paged_attention_triton(*given), paged_attention_reference(*given))


@pytest.mark.parametrize("num_queries", [1, 64])
def test_queries_beyond_float16_see_whom_they_are_like(num_queries, device):
    """Products over FP8 are of float16: infinity times zero would be NaN."""
    case = Case.build(Shape((num_queries,), (80,), 2, 1, 64), torch.bfloat16, device)
    case.query.zero_()[..., 3] = 1e6
    case.key_cache.zero_()[0, 5, 0, 3] = 8.0
    held = in_fp8(case, torch.float8_e4m3fn)
    given = (held.query, held.key_cache, held.value_cache, held.metadata, held.scale, None, None, SCALES)
    output = paged_attention_triton(*given)
    assert_close(output, paged_attention_reference(*given))


@pytest.mark.parametrize(("first", "width", "paired"), [(2, 18, True), (1, 18, False), (0, 17, False)])
def test_values_are_read_in_pairs_where_each_head_begins_at_an_even_address(first, width, paired, device):
    """The interpreter reads from odd ones too, and a GPU does not."""
    case = in_fp8(Case.build(Shape((1, 2), (40, 17)), torch.float16, device), torch.float8_e5m2)
    caches = torch.zeros(2, *case.key_cache.shape[:3], width, dtype=torch.uint8, device=device)
    held = (case.key_cache, case.value_cache)
    caches[..., first : first + 16] = torch.stack([each.view(torch.uint8) for each in held])
    keys, values = caches.view(torch.float8_e5m2)[..., first : first + 16]
    assert has_pairs(values) == paired

    def attended(keys: Tensor, values: Tensor) -> Tensor:
        return paged_attention_triton(case.query, keys, values, case.metadata, case.scale, kv_scales=SCALES)

    assert_close(attended(keys, values), attended(*held))


@FORMATS
@pytest.mark.parametrize("name", ["nested", "chunks"])
def test_shared_prefixes(name, dtype, device):
    metadata = build(BATCHES[name], device=device)
    case = in_fp8(Case(*tensors(metadata, 6, 2, 80, torch.float32), metadata, 80**-0.5), dtype)
    plan = plan_attention(metadata, AttentionShape(6, 2, 80, torch.float32), None, lambda members, tokens: True)
    held = DevicePlan.holding(plan, 6, 80, device)
    output, lse = torch.full_like(case.query, torch.nan), torch.full(case.query.shape[:2], torch.nan, device=device)
    tensors_given = (case.query, case.key_cache, case.value_cache)
    attend_planned(*tensors_given, held, case.scale, output, lse, kv_scales=SCALES)
    expected, expected_lse = paged_attention_with_lse(*tensors_given, metadata, case.scale, kv_scales=SCALES)
    assert_close(output, expected)
    assert_close(lse, expected_lse)


@FORMATS
@pytest.mark.parametrize("rotary_dim", [64, 24])
def test_rotated_and_written(rotary_dim, dtype, triton_dtype, device):
    """Untouched slots keep what they have."""
    tokens, heads, kv_heads, head_dim = 5, 6, 2, 64
    qkv = representable(tokens, (heads + 2 * kv_heads) * head_dim).to(device, triton_dtype)
    # Quarter turns, which round nothing.
    turns = torch.arange(tokens * rotary_dim // 2).view(tokens, -1) % 4
    cos, sin = (torch.tensor(each, dtype=triton_dtype)[turns].to(device) for each in ([1, 0, -1, 0], [0, 1, 0, -1]))
    slots = torch.tensor([7, 0, 22, 13, 5], device=device)
    caches, expected = torch.ones(2, 2, 6, 4, kv_heads, head_dim, device=device).to(dtype)
    keys, values = caches
    expected_keys, expected_values = expected
    queries = rotate_and_write_triton(qkv, cos, sin, keys, values, slots, kv_scales=SCALES)
    expected_queries = rotate_and_write_reference(
        qkv, cos, sin, expected_keys, expected_values, slots, None, None, 0.0, SCALES
    )
    assert torch.equal(queries, expected_queries)
    assert torch.equal(caches.float(), expected.float())


@FORMATS
def test_latents_are_written(dtype, triton_dtype, device):
    """A key that is turned by nothing, and a norm that changes nothing but what it rounds."""
    given = latents_of(5, 6, 32, 8, device)
    given["latents"][:, :32], given["latents"][:, 32:] = 1.5, representable(5, 8).to(device)
    given["latents"][:, 1:32:2] *= -1
    given |= {"norm": torch.ones(32, device=device), "cos": torch.ones_like(given["cos"])}
    given["sin"] = torch.zeros_like(given["cos"])
    given = {name: each.to(triton_dtype) if each.is_floating_point() else each for name, each in given.items()}
    cache = torch.ones(given["cache"].shape, device=device).to(dtype)
    expected = cache.clone()
    rotate_and_write_latents_triton(**given | {"cache": cache}, eps=0.0)
    rotate_and_write_latents_reference(**given | {"cache": expected}, eps=0.0)
    assert torch.equal(cache.float(), expected.float())
    assert (cache.float() != 1).any()


@FORMATS
@pytest.mark.parametrize(("key", "value"), [(1e6, -1e6), (-1e6, 1e6)])
def test_what_fp8_cannot_reach_is_written_as_its_largest(key, value, dtype, device):
    qkv = torch.tensor([1.0, key, value], device=device).repeat_interleave(16).view(1, -1)
    cos, sin = torch.ones(1, 8, device=device), torch.zeros(1, 8, device=device)
    caches = torch.zeros(2, 1, 1, 1, 16, device=device).to(dtype)
    rotate_and_write_triton(qkv, cos, sin, caches[0], caches[1], torch.tensor([0], device=device))
    largest = FP8_LARGEST[dtype]
    assert caches.float().flatten(1).tolist() == [[largest if x > 0 else -largest] * 16 for x in (key, value)]


def test_ties_are_written_as_even_numbers(device):
    """And what is a little more or less than one. In e5m2: the interpreter cuts e4m3 off."""
    numbers = torch.arange(0x7C, dtype=torch.uint8, device=device).view(torch.float8_e5m2).float()
    ties = (numbers[:-1] + numbers[1:]) / 2
    given = torch.cat((numbers, ties, ties * (1 + 2**-20), ties * (1 - 2**-20)))
    given = torch.cat((given, -given, given.new_zeros(-2 * len(given) % 16))).view(-1, 16)
    caches = torch.zeros(2, -(-len(given) // 16), 16, 1, 16, device=device).to(torch.float8_e5m2)
    cos, sin = torch.ones(len(given), 8, device=device), torch.zeros(len(given), 8, device=device)
    slots = torch.arange(len(given), device=device)
    rotate_and_write_triton(given.repeat(1, 3), cos, sin, caches[0], caches[1], slots)
    expected = given.to(torch.float8_e5m2).float()
    for cache in caches.float():
        assert torch.equal(cache.view(-1, 16)[: len(given)], expected)


def test_nan_is_written_as_nan(device):
    """In e5m2, whose NaN the interpreter knows too."""
    cos, sin = torch.ones(1, 8, device=device), torch.zeros(1, 8, device=device)
    caches = torch.zeros(2, 1, 1, 1, 16, device=device).to(torch.float8_e5m2)
    qkv = torch.full((1, 48), torch.nan, device=device)
    rotate_and_write_triton(qkv, cos, sin, caches[0], caches[1], torch.tensor([0], device=device))
    assert caches.float().isnan().all()


def test_caches_of_two_formats_are_refused(device):
    case = in_fp8(Case.build(MIXED, device=device), torch.float8_e5m2)
    values = case.value_cache.to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"key_cache is torch.float8_e5m2 and value_cache torch.float8_e4m3fn"):
        paged_attention_triton(case.query, case.key_cache, values, case.metadata, case.scale)
    qkv, cos = torch.zeros(1, 48, device=device), torch.zeros(1, 8, device=device)
    caches = torch.zeros(2, 1, 1, 1, 16, device=device).to(torch.float8_e5m2)
    with pytest.raises(ValueError, match=r"value_cache .* is float8_e4m3fn, and must be float8_e5m2"):
        rotate_and_write_triton(
            qkv, cos, cos, caches[0], caches[1].to(torch.float8_e4m3fn), torch.tensor([0], device=device)
        )
