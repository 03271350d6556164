"""Addresses in tensors of more than 2**31 numbers, as steps, caches and states have them on a GPU.

What ends beyond 32 bits on its way to an address fails, and so does what lies outside of the tensors.
"""

import pytest
import torch

pytest.importorskip("triton", reason="the Triton kernels are for where it is installed")

from headrace.kernels.activation import clamped_swiglu
from headrace.kernels.activation.reference import silu_and_mul_reference
from headrace.kernels.activation.triton import clamped_swiglu_triton, silu_and_mul_triton
from headrace.kernels.causal_conv.triton import causal_conv_triton
from headrace.kernels.gated_delta.triton import gated_delta_rule_triton, gated_rms_norm_triton
from headrace.kernels.kv_cache.triton import copy_blocks_triton
from headrace.kernels.layer_norm.triton import add_layer_norm_triton
from headrace.kernels.mamba2.triton import grouped_gated_rms_norm_triton, selective_scan_triton
from headrace.kernels.moe.triton_kernels import mix_rows_kernel
from headrace.kernels.norm_rotary.triton import (
    add_rms_norm_triton,
    rotate_and_write_latents_triton,
    rotate_and_write_triton,
)
from headrace.kernels.paged_attention.attention_shape import AttentionShape
from headrace.kernels.paged_attention.device_plan import DevicePlan
from headrace.kernels.paged_attention.metadata import AttentionMetadata
from headrace.kernels.paged_attention.plan import ITEM_FIELDS
from headrace.kernels.paged_attention.planning import plan_attention
from headrace.kernels.paged_attention.triton import attend_planned, paged_attention_triton
from headrace.kernels.recurrent_states import StateSlots
from headrace.kernels.sampling.triton import (
    apply_bit_mask_triton,
    likeliest_tokens_triton,
    penalize_triton,
    sample_tokens_triton,
)

from .causal_conv_cases import conv_case
from .gated_delta_cases import rule_case
from .large_tensors import DTYPE, apart, at_the_end, huge, refuse_overflows, run_last_programs
from .mamba2_cases import scan_case
from .tolerances import assert_close

pytestmark = pytest.mark.skipif(
    "config.getoption('--device') != 'cpu' or 'HEADRACE_TESTS_CAPABILITY' in os.environ",
    reason="it is Triton's interpreter that sees what overflows",
)
# A step's, so that rows of 8,192 numbers are more than 2**31.
MANY_TOKENS = 300_000
MANY_BLOCKS = 2**20


@pytest.fixture(autouse=True)
def _overflows_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_overflows(monkeypatch)


@pytest.fixture
def _last_program(monkeypatch: pytest.MonkeyPatch) -> None:
    run_last_programs(monkeypatch)


@pytest.mark.usefixtures("_last_program")
def test_gates():
    gate_up = at_the_end(torch.randn(2 * 28_672, dtype=DTYPE), 40_000)
    for got, expected in (
        (silu_and_mul_triton(gate_up), silu_and_mul_reference(gate_up[-1:])),
        (clamped_swiglu_triton(gate_up, 7.0, 1.7), clamped_swiglu(gate_up[-1:], 7.0, 1.7)),
    ):
        assert_close(got[-1, -512:], expected[0, -512:])


@pytest.mark.usefixtures("_last_program")
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_norms(norm):
    x, residual = (at_the_end(torch.randn(8192, dtype=DTYPE), MANY_TOKENS) for _ in range(2))
    weight, expected = torch.ones(8192, dtype=DTYPE), (x[-1] + residual[-1]).clone()
    if norm == "rms":
        normed = add_rms_norm_triton(x, residual, weight, 0.0)
    else:
        normed = add_layer_norm_triton(x, residual, weight, weight * 0, 0.0)
    assert torch.equal(residual[-1], expected)
    centred = expected.float() - (0 if norm == "rms" else expected.float().mean())
    assert_close(normed[-1], (centred / centred.square().mean().sqrt()).to(DTYPE))


@pytest.mark.usefixtures("_last_program")
def test_rotate_and_write():
    """The last program is that of the last token's values."""
    heads, kv_heads, size = 64, 8, 128
    qkv = at_the_end(torch.randn((heads + 2 * kv_heads) * size, dtype=DTYPE), MANY_TOKENS)
    angles = huge(MANY_TOKENS, size // 2)
    keys, values = huge(2, MANY_BLOCKS, 16, kv_heads, size).unbind()
    slots = torch.full((MANY_TOKENS,), 16 * MANY_BLOCKS - 1)
    rotate_and_write_triton(qkv, angles, angles, keys, values, slots)
    assert torch.equal(values[-1, -1].flatten(), qkv[-1, -kv_heads * size :])


@pytest.mark.usefixtures("_last_program")
def test_rotate_and_write_latents():
    """The last program is that of the last token's last heads."""
    heads, size, rotary_dim = 128, 512, 64
    turned = at_the_end(torch.randn(heads * 192, dtype=DTYPE), MANY_TOKENS).view(MANY_TOKENS, heads, 192)[..., 128:]
    latents, angles = huge(MANY_TOKENS, size + rotary_dim), huge(MANY_TOKENS, rotary_dim // 2)
    angles[-1] = 1
    queries, cache = huge(MANY_TOKENS, heads, size + rotary_dim), huge(2**19, 16, 1, size + rotary_dim)
    slots, norm = torch.full((MANY_TOKENS,), 16 * 2**19 - 1), torch.ones(size, dtype=DTYPE)
    rotate_and_write_latents_triton(turned, latents, norm, 1e-6, angles, huge(*angles.shape), queries, cache, slots)
    assert torch.equal(queries[-1, -32:, size:], turned[-1, -32:])


@pytest.mark.usefixtures("_last_program")
def test_a_latent_is_written_into_the_last_block():
    """One token, whose latent is the only thing that there is to do."""
    latents, angles = torch.randn(1, 576, dtype=DTYPE), torch.ones(1, 32, dtype=DTYPE)
    cache, queries = huge(2**19, 16, 1, 576), torch.zeros(1, 0, 576, dtype=DTYPE)
    slots, norm = torch.tensor([16 * 2**19 - 1]), torch.ones(512, dtype=DTYPE)
    rotate_and_write_latents_triton(queries[..., 512:], latents, norm, 1e-6, angles, angles * 0, queries, cache, slots)
    assert torch.equal(cache[-1, -1, 0, 512:], latents[0, 512:])
    assert cache[-1, -1, 0, :512].any()


@pytest.mark.usefixtures("_last_program")
def test_copied_blocks():
    """In 141 GB, of a model with 80 layers."""
    cache = huge(2, 80, 27_000, 16, 8, 128)
    cache[-1, -1, -1, -1, -1] = 3
    copy_blocks_triton(cache, torch.tensor([26_999]), torch.tensor([26_998]))
    assert bool((cache[-1, -1, -2, -1, -1] == 3).all())


@pytest.mark.parametrize("dtype", [DTYPE, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("lengths", [(1, 1, 1), (20, 3)], ids=["decodes", "chunk"])
def test_attention(lengths, dtype):
    """In the last of a million blocks, with tokens far apart; as with few blocks and tokens side by side."""
    small = torch.randn(2, 20, 16, 8, 128).to(dtype)
    large = huge(2, MANY_BLOCKS, 16, 8, 128, dtype=torch.uint8 if dtype.itemsize == 1 else dtype).view(dtype)
    large.view(torch.uint8)[:, -20:] = small.view(torch.uint8)
    query = torch.randn(sum(lengths), 16, 128, dtype=DTYPE)
    tables = [[0, 1, 19], [0, 1, 7, 18], [0, 1, 2]][: len(lengths)]

    def attended(query: torch.Tensor, caches: torch.Tensor) -> torch.Tensor:
        first = caches.shape[1] - 20
        moved = [[first + block for block in table] for table in tables]
        metadata = AttentionMetadata(lengths, [40, 50, 35][: len(lengths)], moved, 16, query.device)
        return paged_attention_triton(query, caches[0], caches[1], metadata, 0.1)

    assert torch.equal(attended(apart(query), large), attended(query, small))


@pytest.mark.parametrize("lengths", [(1, 1, 1), (20, 3)], ids=["decodes", "chunk"])
def test_attention_to_latents(lengths):
    """As `test_attention`."""
    small, large = torch.randn(20, 16, 1, 80, dtype=DTYPE), huge(2**21, 16, 1, 80)
    large[-20:] = small
    query = torch.randn(sum(lengths), 5, 80, dtype=DTYPE)
    tables = [[0, 1, 19], [0, 1, 7, 18], [0, 1, 2]][: len(lengths)]

    def attended(query: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        first = cache.shape[0] - 20
        moved = [[first + block for block in table] for table in tables]
        metadata = AttentionMetadata(lengths, [40, 50, 35][: len(lengths)], moved, 16, query.device)
        return paged_attention_triton(query, cache, cache[..., :64], metadata, 0.1)

    assert torch.equal(attended(apart(query), large), attended(query, small))


def test_parts_of_attention():
    """In the last rows of a workspace, merged for tokens far apart; as with few rows and tokens side by side."""
    query, (keys, values) = torch.randn(3, 16, 128, dtype=DTYPE), torch.randn(2, 64, 16, 2, 128, dtype=DTYPE)
    tables = [[60], list(range(20)), list(range(20, 60))]
    metadata = AttentionMetadata([1, 1, 1], [1, 310, 620], tables, 16, query.device)
    shape = AttentionShape(16, 2, 128, DTYPE)

    def attended(query: torch.Tensor, output: torch.Tensor, first: int) -> torch.Tensor:
        plan = plan_attention(metadata, shape)
        assert plan.merge_tokens.tolist() == [1, 2]
        num_rows = first + int(plan.merge_rows.max()) + 1
        plan.narrow[:, ITEM_FIELDS.index("first_partial")] += first
        plan.merge_rows[:] += first
        held = DevicePlan.holding(plan, 16, 128, query.device)
        held.partial_output = huge(num_rows, 16, 128, dtype=torch.float32)
        held.partial_lse = huge(num_rows, 16, dtype=torch.float32)
        attend_planned(query, keys, values, held, 0.1, output)
        return output

    expected = attended(query, torch.zeros_like(query), 0)
    assert expected.any()
    assert torch.equal(attended(apart(query), apart(torch.zeros_like(query)), 2**20), expected)


def test_rows_of_logits():
    """As far apart as if there were thousands between them."""
    logits = apart(torch.randn(3, 40))
    assert torch.equal(likeliest_tokens_triton(logits, with_log_sum_exp=True).logits, logits.max(1).values)
    (row, token), one = torch.tensor([[2], [39]]), torch.ones(1)
    before = logits[2, 39].item()
    penalize_triton(logits, row, token, row, one, one * 0, one)
    assert logits[2, 39].item() == pytest.approx(before - 2)
    apply_bit_mask_triton(logits, torch.zeros(3, 2, dtype=torch.int32))
    assert bool((logits == -torch.inf).all())


def test_tokens_of_rows_of_logits(monkeypatch):
    # Floats' bits are reckoned with, of which some overflow that nobody looks at.
    refuse_overflows(monkeypatch, False)
    logits = apart(torch.randn(3, 40))
    doubles, ints = torch.ones(3, dtype=torch.float64), torch.ones(3, dtype=torch.int64)
    tokens = sample_tokens_triton(logits, doubles, ints, doubles, doubles * 0, doubles / 2)
    assert torch.equal(tokens, logits.argmax(1))


@pytest.mark.parametrize("lengths", [(1, 2), (17, 1)], ids=["few", "chunks"])
def test_states(lengths):
    """With as many slots as have more than 2**31 numbers, and tokens far apart; as with few, side by side."""
    cpu = torch.device("cpu")
    rule, conv = rule_case(lengths, (2, 4, 24, 40), DTYPE, cpu), conv_case(lengths, 40, 4, DTYPE, cpu)
    scan, few = scan_case(lengths, (2, 4, 24, 40), DTYPE, cpu), StateSlots(lengths, (2, 0), (1, 0), cpu)
    for launch, given, rows in (
        (gated_delta_rule_triton, vars(rule), ("mixed", "decay", "beta")),
        (selective_scan_triton, vars(scan), ("mixed", "dt")),
        (causal_conv_triton, vars(conv), ("x",)),
    ):
        states = torch.randn(3, *given["states"].shape[1:]).to(given["states"].dtype)
        before = 2**31 // states[0].numel() + 1
        large = huge(before + 3, *states.shape[1:], dtype=states.dtype)
        large[-3:] = states
        slots = StateSlots(lengths, (before + 2, before), (before + 1, before), cpu)
        moved = {name: apart(given[name]) for name in rows}
        got = launch(**given | moved | {"states": large, "slots": slots})
        assert torch.equal(got, launch(**given | {"states": states, "slots": few}))
        assert torch.equal(large[-3:], states)


@pytest.mark.usefixtures("_last_program")
def test_rows_of_heads():
    x = at_the_end(torch.ones(32, 128, dtype=DTYPE), 600_000)
    gate = at_the_end(torch.full((32 * 128,), 20.0, dtype=DTYPE), 600_000)
    assert bool((gated_rms_norm_triton(x, gate, torch.ones(128, dtype=DTYPE), 0.0)[-1, -1] == 20).all())


@pytest.mark.usefixtures("_last_program")
def test_rows_of_groups():
    x, gate = at_the_end(torch.ones(8192, dtype=DTYPE), MANY_TOKENS), huge(MANY_TOKENS, 8192)
    gate[-1] = 20
    normed = grouped_gated_rms_norm_triton(x, gate, torch.full((8192,), 3, dtype=DTYPE), 0.0, 8)
    assert bool((normed[-1, -1024:] == 3).all())


@pytest.mark.usefixtures("_last_program")
def test_rows_of_experts():
    rows, output = at_the_end(torch.ones(8, 4096, dtype=DTYPE), MANY_TOKENS), huge(MANY_TOKENS, 4096)
    shares = torch.ones(MANY_TOKENS, 8)
    mix_rows_kernel[(MANY_TOKENS, 4)](output, rows, shares, 4096, CHOSEN=8, COLUMNS=1024, IS_EARLY=False)
    assert bool((output[-1, -1024:] == 8).all())
