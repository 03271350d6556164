"""The GPU's attention against the one-head-at-a-time reference."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

from headrace.kernels.paged_attention import attention_shape
from headrace.kernels.paged_attention.attention_shape import AttentionShape
from headrace.kernels.paged_attention.device_plan import DevicePlan, PlanCapacity, PlanTooLargeError
from headrace.kernels.paged_attention.kernel_shapes import KernelShapes
from headrace.kernels.paged_attention.plan import ITEM_FIELDS, AttentionPlan
from headrace.kernels.paged_attention.planning import plan_attention
from headrace.kernels.paged_attention.prefix_groups import Gate
from headrace.kernels.paged_attention.reference import paged_attention_with_lse
from headrace.kernels.paged_attention.triton import attend_planned, paged_attention_triton

from .attention_cases import MIXED, Case, Shape
from .shared_prefix_cases import BATCHES, SYSTEM, Row, build, tensors
from .tolerances import assert_close

LONG = Shape(query_lens=(1, 1, 3, 40), context_lens=(1, 900, 700, 300))
SHAPES = [
    Shape((1,), (1,)),
    Shape((1, 1, 1), (1, 17, 200), head_dim=64),
    Shape((9,), (150,), head_dim=256),
    Shape((1, 20), (70, 40), num_heads=8, num_kv_heads=1, head_dim=512),
    Shape((3, 64), (35, 65), head_dim=128),
    replace(MIXED, num_heads=3, num_kv_heads=3, head_dim=80),
    replace(MIXED, num_heads=6, num_kv_heads=3, head_dim=64, block_size=8),
    replace(MIXED, num_heads=3, num_kv_heads=1, head_dim=96),
    replace(MIXED, num_heads=8, num_kv_heads=2, head_dim=128, block_size=32),
    Shape((1, 40), (200, 140), num_heads=2, num_kv_heads=1, head_dim=64, block_size=128),
    replace(MIXED, num_heads=5, num_kv_heads=1, head_dim=64),
    replace(MIXED, num_heads=6, num_kv_heads=1, head_dim=80, block_size=8),
    replace(MIXED, num_heads=7, num_kv_heads=1, head_dim=64, block_size=32),
    replace(MIXED, num_heads=8, num_kv_heads=1, head_dim=128),
    replace(MIXED, num_heads=20, num_kv_heads=1, head_dim=64),
    LONG,
]


# GLM-4.7-Flash's, and some of other sizes: heads that are taken in parts, and latents that are no power of two.
LATENTS = [
    Shape((1, 1, 3, 20), (1, 300, 70, 40), 20, 1, head_dim=576, value_dim=512),
    replace(MIXED, num_heads=5, num_kv_heads=1, head_dim=44, value_dim=36),
    Shape((1, 1, 9), (17, 200, 9), num_heads=70, num_kv_heads=1, head_dim=96, value_dim=80, block_size=8),
    replace(LONG, num_heads=6, num_kv_heads=1, head_dim=80, value_dim=64),
]


def never(num_sequences: int, num_tokens: int) -> bool:
    return False


def always(num_sequences: int, num_tokens: int) -> bool:
    return True


def shape_of(case: Case) -> AttentionShape:
    (_, num_heads, key_dim), (num_kv_heads, value_dim) = case.query.shape, case.value_cache.shape[2:]
    return AttentionShape.of(num_heads, num_kv_heads, key_dim, value_dim, case.query.dtype, case.query.device)


def hold(case: Case, plan: AttentionPlan) -> DevicePlan:
    return DevicePlan.holding(plan, case.query.shape[1], case.value_cache.shape[3], case.query.device)


def attend(
    case: Case,
    plan: DevicePlan,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exps, written over NaN."""
    output = torch.full_like(case.query[..., : case.value_cache.shape[3]], torch.nan)
    lse = torch.full(case.query.shape[:2], torch.nan, device=case.query.device)
    plan.partial_output.fill_(torch.nan)
    plan.partial_lse.fill_(torch.nan)
    given = case.query, case.key_cache, case.value_cache, plan, case.scale, output, lse, sliding_window, soft_cap
    attend_planned(*given, sinks=sinks)
    return output, lse


def check(
    case: Case,
    gate: Gate = never,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    plan = hold(case, plan_attention(case.metadata, shape_of(case), sliding_window, gate))
    output, lse = attend(case, plan, sliding_window, soft_cap, sinks)
    given = case.query, case.key_cache, case.value_cache, case.metadata, case.scale, sliding_window, soft_cap
    expected, expected_lse = paged_attention_with_lse(*given, sinks=sinks)
    assert_close(output, expected)
    assert_close(lse, expected_lse)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_against_the_reference(shape, triton_dtype, device):
    check(Case.build(shape, triton_dtype, device))


@pytest.mark.parametrize("shape", LATENTS, ids=str)
def test_latents(shape, triton_dtype, device):
    """What lies behind a latent is the rest of its key, and no value."""
    check(Case.build(shape, triton_dtype, device))


@pytest.mark.parametrize("name", BATCHES)
def test_shared_prefixes_of_latents(name, triton_dtype, device):
    metadata = build(BATCHES[name], 16, device)
    query, keys, _ = tensors(metadata, 4, 1, 80, triton_dtype)
    case = Case(query, keys, keys[..., :64], metadata, 80**-0.5)
    assert len(plan_attention(metadata, shape_of(case), None, always).merge_rows)
    check(case, always)


def test_latents_on_a_gpu_with_less_shared_memory(triton_dtype, device, monkeypatch):
    monkeypatch.setattr(attention_shape, "shared_bytes", lambda device: 99 * 1024)
    check(Case.build(LATENTS[2], triton_dtype, device))


@pytest.mark.parametrize("sliding_window", [1, 13, 300, 1000])
@pytest.mark.parametrize("shape", [MIXED, LONG], ids=["mixed", "long"])
def test_a_window(shape, sliding_window, triton_dtype, device):
    check(Case.build(shape, triton_dtype, device), sliding_window=sliding_window)


@pytest.mark.parametrize(("block_size", "head_dim"), [(8, 96), (32, 256)])
def test_a_window_across_other_blocks(block_size, head_dim, device):
    case = Case.build(Shape((1, 3, 20), (50, 33, 20), 4, 2, head_dim, block_size), device=device)
    check(case, sliding_window=17)


@pytest.mark.parametrize("shape", [replace(MIXED, head_dim=256), replace(LONG, head_dim=128)], ids=str)
def test_a_gpu_with_less_shared_memory(shape, triton_dtype, device, monkeypatch):
    monkeypatch.setattr(attention_shape, "shared_bytes", lambda device: 99 * 1024)
    check(Case.build(shape, triton_dtype, device))


@pytest.mark.parametrize(("shape", "sliding_window"), [(MIXED, None), (MIXED, 13), (LONG, None)], ids=str)
def test_tuned_shapes(shape, sliding_window, device):
    """As `benchmarks/gpu_tuning.py` tries them."""
    case = Case.build(shape, device=device)
    chosen = shape_of(case)
    kernels = chosen.kernels(case.query.device)
    narrow, wide = kernels.narrow, kernels.wide
    tuned = KernelShapes(replace(narrow, tile=2 * narrow.tile), replace(wide, rows=2 * wide.rows, tile=wide.tile // 2))
    plan = hold(case, plan_attention(case.metadata, replace(chosen, tuned=tuned), sliding_window, never))
    output = torch.full_like(case.query, torch.nan)
    given = case.query, case.key_cache, case.value_cache, plan, case.scale, output
    attend_planned(*given, sliding_window=sliding_window, tuned=tuned)
    assert_close(output, case.reference(sliding_window))


@pytest.mark.parametrize("sliding_window", [None, 13])
@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_a_soft_cap(soft_cap, sliding_window, triton_dtype, device):
    check(Case.build(MIXED, triton_dtype, device), soft_cap=soft_cap, sliding_window=sliding_window)


def sinks_for(case: Case) -> Tensor:
    """About as large as scores are, one far above all of these and one far below."""
    sinks = torch.randn(case.query.shape[1], generator=torch.Generator().manual_seed(8)) * 2
    sinks[0], sinks[-1] = 60.0, -60.0
    return sinks.to(case.query.device)


@pytest.mark.parametrize("sliding_window", [None, 13])
@pytest.mark.parametrize("soft_cap", [None, 3.0])
@pytest.mark.parametrize("shape", [MIXED, LONG, replace(MIXED, num_heads=8, num_kv_heads=1, head_dim=64)], ids=str)
def test_sinks(shape, soft_cap, sliding_window, triton_dtype, device):
    """Split and in one item, narrow and wide: once a query and head."""
    case = Case.build(shape, triton_dtype, device)
    check(case, sliding_window=sliding_window, soft_cap=soft_cap, sinks=sinks_for(case))


@pytest.mark.parametrize("name", BATCHES)
def test_sinks_beside_shared_prefixes(name, triton_dtype, device):
    metadata = build(BATCHES[name], 16, device)
    case = Case(*tensors(metadata, 6, 2, 80, triton_dtype), metadata, 80**-0.5)
    assert len(plan_attention(metadata, shape_of(case), None, always).merge_rows)
    check(case, always, sinks=sinks_for(case))


def test_sinks_with_a_shared_prefix_longer_than_a_segment(device):
    metadata = build([Row(list(range(40)), own) for own in (1, 7, 30)], device=device)
    case = Case(*tensors(metadata, 4, 2, 64, torch.float32), metadata, 0.125)
    check(case, always, sinks=sinks_for(case))


def test_with_a_sink_alone_a_query_is_zero(device):
    case = Case.build(Shape((1,), (1,)), device=device)
    plan = plan_attention(case.metadata, shape_of(case))
    plan.narrow[:, ITEM_FIELDS.index("kv_end")] = 0
    sinks = sinks_for(case)
    output, lse = attend(case, hold(case, plan), sinks=sinks)
    assert not output.any()
    assert_close(lse, sinks.unsqueeze(0))


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (lambda eight: eight[:3], r"sinks \(3,\) must have the shape \[4\]"),
        (lambda eight: eight[:4].half(), r"sinks \(4,\) is float16, and must be float32"),
        (lambda eight: eight[:4].to("meta"), r"sinks \(4,\) is on meta"),
        # Made where it is used: a tensor with gaps has none any more when it is moved.
        (lambda eight: eight[::2], r"sinks \(4,\) must be contiguous"),
    ],
    ids=["number", "dtype", "device", "layout"],
)
def test_sinks_that_do_not_fit_are_named(sinks, message, device):
    case = Case.build(MIXED, device=device)
    given = sinks(torch.zeros(8, device=device))
    with pytest.raises(ValueError, match=message):
        check(case, sinks=given)
    with pytest.raises(ValueError, match=message):
        paged_attention_triton(case.query, case.key_cache, case.value_cache, case.metadata, case.scale, sinks=given)


def test_long_contexts_are_split_and_short_ones_are_not(device):
    case = Case.build(LONG, device=device)
    plan = plan_attention(case.metadata, shape_of(case), None, never)
    assert set(range(1, 5)) <= set(plan.merge_tokens.tolist())
    assert 0 not in plan.merge_tokens


@pytest.mark.parametrize(("block_size", "heads", "kv_heads", "dim"), [(8, 4, 4, 64), (16, 6, 2, 80), (32, 7, 1, 128)])
@pytest.mark.parametrize("name", BATCHES)
def test_shared_prefixes(name, block_size, heads, kv_heads, dim, triton_dtype, device):
    metadata = build(BATCHES[name], block_size, device)
    case = Case(*tensors(metadata, heads, kv_heads, dim, triton_dtype), metadata, dim**-0.5)
    assert len(plan_attention(metadata, shape_of(case), None, always).merge_rows)
    check(case, always)


@pytest.mark.parametrize(("block_size", "heads", "kv_heads", "dim"), [(16, 5, 1, 96), (8, 4, 1, 256), (32, 2, 1, 64)])
def test_shared_prefixes_of_other_head_sizes(block_size, heads, kv_heads, dim, device):
    metadata = build(BATCHES["decodes"], block_size, device)
    check(Case(*tensors(metadata, heads, kv_heads, dim, torch.float32), metadata, dim**-0.5), always)


def test_a_shared_prefix_longer_than_a_segment(device):
    rows = [Row(list(range(40)), own) for own in (1, 7, 30)]
    metadata = build(rows, device=device)
    case = Case(*tensors(metadata, 4, 2, 64, torch.float32), metadata, 0.125)
    check(case, always)
    check(case, always, soft_cap=2.0)


def test_a_part_without_keys_has_no_weight(device):
    """No engine makes one; the parts' arithmetic must stand it."""
    metadata = build([Row(SYSTEM, 1)] * 3, device=device)
    case = Case(*tensors(metadata, 4, 2, 64, torch.float32), metadata, 0.125)
    plan = plan_attention(metadata, shape_of(case), None, always)
    begin, end = ITEM_FIELDS.index("kv_begin"), ITEM_FIELDS.index("kv_end")
    suffixes = plan.narrow[:, begin] == 160
    assert suffixes.sum() == 3
    plan.narrow[suffixes, end] = 160
    output, lse = attend(case, hold(case, plan))
    prefix_alone = replace(metadata, context_lens=[160] * 3)
    expected, expected_lse = paged_attention_with_lse(
        case.query, case.key_cache, case.value_cache, prefix_alone, case.scale
    )
    assert_close(output, expected)
    assert_close(lse, expected_lse)


def test_a_query_without_keys_is_zero(device):
    case = Case.build(Shape((1,), (1,)), device=device)
    plan = plan_attention(case.metadata, shape_of(case))
    plan.narrow[:, ITEM_FIELDS.index("kv_end")] = 0
    output, lse = attend(case, hold(case, plan))
    assert not output.any()
    assert torch.isneginf(lse).all()


def test_one_plan_memory_serves_any_mix(device):
    first, second = Case.build(MIXED, device=device), Case.build(LONG, device=device)
    plans = [plan_attention(case.metadata, shape_of(case), None, never) for case in (first, second, first)]
    capacity = PlanCapacity(narrow=50, wide=20, query_tokens=100, blocks=200, merge_tokens=50, merge_rows=500)
    held = DevicePlan(capacity, first.query.shape[1], first.query.shape[2], device)
    for case, plan in zip((first, second, first), plans, strict=True):
        held.load(plan)
        output, lse = attend(case, held)
        expected, expected_lse = attend(case, hold(case, plan))
        assert torch.equal(output, expected)
        assert torch.equal(lse, expected_lse)


def test_a_plan_that_does_not_fit_is_refused(device):
    case = Case.build(MIXED, device=device)
    plan = plan_attention(case.metadata, shape_of(case))
    held = DevicePlan(replace(PlanCapacity.of(plan), blocks=3), 4, 16, device)
    with pytest.raises(PlanTooLargeError, match=r"blocks takes \d+ of 3"):
        held.load(plan)


def test_what_lies_beyond_a_sequences_tokens_does_not_matter(device):
    case = Case.build(MIXED, device=device)
    expected = run(case)
    written = torch.zeros(case.key_cache.shape[:2], dtype=torch.bool)
    for table, length in zip(case.metadata.block_tables, case.metadata.context_lens, strict=True):
        for position in range(length):
            written[table[position // 16], position % 16] = True
    case.key_cache[~written] = torch.nan
    case.value_cache[~written] = torch.nan
    assert torch.equal(run(case), expected)


def run(case: Case, sliding_window: int | None = None) -> Tensor:
    return paged_attention_triton(
        case.query, case.key_cache, case.value_cache, case.metadata, case.scale, sliding_window
    )


def test_layers_with_different_windows_share_a_batchs_metadata(device):
    case = Case.build(MIXED, device=device)
    for sliding_window in (13, None, 5, 13, None):
        assert_close(run(case, sliding_window), case.reference(sliding_window))


def test_tensors_may_be_parts_of_wider_ones(device):
    """Queries as a slice of the fused projection, caches as a layer of the whole cache."""
    case = Case.build(MIXED, device=device)
    wide = torch.randn(len(case.query), 9, 16, device=device)
    wide[:, 2:6] = case.query
    both = torch.stack((case.key_cache, case.value_cache))
    assert torch.equal(run(replace(case, query=wide[:, 2:6], key_cache=both[0], value_cache=both[1])), run(case))


@pytest.mark.parametrize(
    ("shape", "change", "message"),
    [
        (LATENTS[1], lambda case: {"value_cache": case.value_cache.clone()}, r"value_cache \(.*\) must be as long as"),
        (
            LATENTS[1],
            lambda case: {"value_cache": case.key_cache[..., :12]},
            "has latents of 12 and keys of 44, and",
        ),
        (replace(LATENTS[1], num_heads=6, num_kv_heads=2), lambda _: {}, "or the first part of its only head"),
        (
            replace(LATENTS[1], head_dim=600, value_dim=520),
            lambda _: {},
            "latents of 520 and keys of 600, and .* to 512",
        ),
        (replace(LATENTS[1], head_dim=600, value_dim=512), lambda _: {}, "keys longer by at most 64"),
    ],
)
def test_latents_that_do_not_fit_are_named(shape, change, message, device):
    case = Case.build(shape, device=device)
    with pytest.raises(ValueError, match=message):
        run(replace(case, **change(case)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: {"query": case.query[1:]}, r"query \(59, 4, 16\) must have the shape \[60, any, any\]"),
        (lambda case: {"query": case.query.double()}, r"query \(60, 4, 16\) is float64"),
        (lambda case: {"query": case.query[:, :3]}, "a multiple of 2 heads"),
        (lambda case: {"query": case.query[..., :8]}, r"query \(60, 4, 8\) has heads of 8"),
        (lambda case: {"query": case.query.repeat(1, 1, 33)}, "has heads of 528"),
        (lambda case: {"query": case.query.transpose(1, 2).contiguous().transpose(1, 2)}, "last dimension"),
        (lambda case: {"key_cache": case.key_cache.half()}, r"key_cache \(.*\) is float16, and must be float32"),
        (lambda case: {"value_cache": case.value_cache[1:]}, r"value_cache \(.*\) must have one shape"),
        (lambda case: {"value_cache": case.value_cache.to("meta")}, r"value_cache .* is on meta"),
        (lambda case: {"metadata": replace(case.metadata, block_size=8)}, r"key_cache .* must have the shape \[any, 8"),
    ],
)
def test_arguments_that_do_not_fit_are_named(change, message, device):
    case = Case.build(MIXED, device=device)
    with pytest.raises(ValueError, match=message):
        run(replace(case, **change(case)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda case: {"query": case.query.double()}, r"query \(60, 4, 16\) is float64"),
        (lambda case: {"query": case.query[..., :8]}, r"query \(60, 4, 8\) has heads of 8"),
        (lambda case: {"key_cache": case.key_cache.half()}, r"key_cache \(.*\) is float16, and must be float32"),
        (
            lambda case: {"key_cache": case.key_cache[:, :12], "value_cache": case.value_cache[:, :12]},
            r"key_cache \(.*, 12, 2, 16\) has blocks of 12; needs a power of two",
        ),
    ],
    ids=["dtype", "head size", "cache dtype", "block size"],
)
def test_arguments_that_do_not_fit_a_plan_are_named(change, message, device):
    case = Case.build(MIXED, device=device)
    plan = hold(case, plan_attention(case.metadata, shape_of(case)))
    with pytest.raises(ValueError, match=message):
        attend(replace(case, **change(case)), plan)


def test_results_that_do_not_fit_are_named(device):
    case = Case.build(MIXED, device=device)
    plan = hold(case, plan_attention(case.metadata, shape_of(case)))
    given = (case.query, case.key_cache, case.value_cache, plan, case.scale)
    with pytest.raises(ValueError, match=r"output \(59, 4, 16\) must have the shape \[60, 4, 16\]"):
        attend_planned(*given, torch.empty_like(case.query)[1:])
    with pytest.raises(ValueError, match=r"lse \(60, 4\) is float16, and must be float32"):
        attend_planned(*given, torch.empty_like(case.query), case.query[..., 0].half())
