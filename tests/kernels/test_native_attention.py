"""The compiled attention kernels against the float32 reference, on each instruction set that this processor has."""

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy
import pytest
import torch
from torch import Tensor

from headrace.kernels.native import InstructionSet, instruction_set
from headrace.kernels.paged_attention import AttentionMetadata, paged_attention_reference
from headrace.kernels.paged_attention.batch_layout import BatchLayout
from headrace.kernels.paged_attention.native import paged_attention_native, takes_native
from headrace.kernels.paged_attention.native_layout import NativeLayout

from .tolerances import TOLERANCES, assert_close

INSTRUCTION_SETS = [each for each in InstructionSet if InstructionSet.NONE < each <= instruction_set()]
pytestmark = pytest.mark.skipif(not INSTRUCTION_SETS, reason="needs the compiled kernels")


@dataclass(frozen=True)
class Batch:
    """Each sequence's new tokens, all its tokens, and which blocks it begins with (names of `PREFIXES`)."""

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    prefixes: tuple[str, ...] = ()

    def num_blocks(self, block_size: int) -> int:
        """How many a cache has: half of them at most are some sequence's."""
        return 2 * sum(-(-length // block_size) for length in self.context_lens)

    def tables(self, block_size: int) -> list[list[int]]:
        """Block tables: prefixes by their tokens' blocks, the rest each sequence's own."""
        known: dict[tuple[str, int], int] = {}
        shuffled = torch.randperm(self.num_blocks(block_size), generator=torch.Generator().manual_seed(1))
        fresh = iter(shuffled.tolist())
        tables = []
        for index, length in enumerate(self.context_lens):
            prefix = self.prefixes[index] if self.prefixes else ""
            names = [(prefix[: block * block_size // 16 + 1], block) for block in range(len(prefix) * 16 // block_size)]
            own = [(f"own {index}", block) for block in range(len(names), -(-length // block_size))]
            tables.append([known.setdefault(name, next(fresh)) for name in (*names, *own)])
        return tables


# A letter stands for sixteen tokens: equal beginnings are shared.
BATCHES = {
    "one-token": Batch((1,), (1,)),
    "decodes": Batch((1,) * 9, (1, 2, 15, 16, 17, 129, 300, 64, 33)),
    "prefill": Batch((7, 64, 200), (7, 64, 200)),
    "mixed": Batch((1, 5, 1, 33, 1, 2, 17, 150), (1, 5, 700, 33, 16, 49, 64, 400)),
    "shared-decodes": Batch((1,) * 40, tuple(range(97, 137)), ("system",) * 40),
    "shared-chunks": Batch((40, 9, 33, 1), (140, 105, 129, 97), ("system",) * 4),
    "nested": Batch(
        (1, 1, 1, 2, 3, 1, 1, 5, 1),
        (161, 170, 163, 133, 137, 97, 128, 69, 30),
        ("system" + "four",) * 3 + ("system" + "on",) * 2 + ("system",) + ("mistress",) + ("abcd",) + ("",),
    ),
    "computed-in-the-same-step": Batch((96, 1, 4), (96, 97, 100), ("system",) * 3),
    "nothing-of-their-own": Batch((1, 1, 2), (96, 96, 96), ("system",) * 3),
}
HEADS = [(9, 3, 64), (4, 4, 16), (2, 1, 32), (6, 2, 80), (7, 1, 128), (4, 2, 96), (8, 1, 64), (5, 1, 256), (8, 1, 512)]


@dataclass(frozen=True)
class Case:
    """Tensors of a `Batch`; what no sequence owns of the caches is NaN."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    metadata: AttentionMetadata

    @classmethod
    def build(
        cls,
        batch: Batch,
        instructions: InstructionSet,
        heads: tuple[int, int, int] = (9, 3, 64),
        block_size: int = 16,
    ) -> "Case":
        """In bfloat16 where there is arithmetic for it, else in float32."""
        dtype = torch.bfloat16 if instructions >= InstructionSet.AVX512_BF16 else torch.float32
        num_heads, num_kv_heads, head_dim = heads
        generator = torch.Generator().manual_seed(2)
        metadata = AttentionMetadata(batch.query_lens, batch.context_lens, batch.tables(block_size), block_size)
        sizes = batch.num_blocks(block_size), block_size, num_kv_heads, head_dim
        caches = torch.randn(2, *sizes, generator=generator).to(dtype)
        caches[:, ~_owned(metadata, sizes[0])] = float("nan")
        query = torch.randn(metadata.num_tokens, num_heads, head_dim, generator=generator).to(dtype)
        return cls(query, caches[0], caches[1], metadata)

    @property
    def scale(self) -> float:
        return float(self.query.shape[2] ** -0.5)

    def run(
        self,
        instructions: InstructionSet | None = None,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        arguments = (self.query, self.key_cache, self.value_cache, self.metadata, self.scale)
        return paged_attention_native(*arguments, sliding_window, soft_cap, sinks, instructions)

    def expected(
        self, sliding_window: int | None = None, soft_cap: float | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        caches = self.key_cache.float(), self.value_cache.float()
        arguments = (self.query.float(), *caches, self.metadata, self.scale, sliding_window, soft_cap)
        return paged_attention_reference(*arguments, sinks=sinks).to(self.query.dtype)


@cache
def _same_case(batch: Batch, instructions: InstructionSet, heads: tuple[int, int, int], block_size: int) -> Case:
    return Case.build(batch, instructions, heads, block_size)


def same_case(
    batch: Batch, instructions: InstructionSet, heads: tuple[int, int, int] = (9, 3, 64), block_size: int = 16
) -> Case:
    """As `build`, once for all instructions of a dtype: to be read alone."""
    return _same_case(batch, of_dtype(instructions), heads, block_size)


def of_dtype(instructions: InstructionSet) -> InstructionSet:
    """Those that stand for all that compute in the same dtype."""
    has_bfloat16 = instructions >= InstructionSet.AVX512_BF16
    return InstructionSet.AVX512_BF16 if has_bfloat16 else InstructionSet.AVX2


def _owned(metadata: AttentionMetadata, num_blocks: int) -> Tensor:
    """[num_blocks, block_size] bool: the slots that some sequence's tokens are in."""
    owned = torch.zeros(num_blocks, metadata.block_size, dtype=torch.bool)
    for table, length in zip(metadata.block_tables, metadata.context_lens, strict=True):
        slots = torch.arange(length)
        owned[torch.tensor(table)[slots // metadata.block_size], slots % metadata.block_size] = True
    return owned


# Far below the scores, among them, and so far above that nothing is left to the values.
SINKS = torch.tensor([-torch.inf, -50.0, -1.0, 0.0, 0.5, 2.0, 5.0, 60.0, 1e4])


@cache
def expected_of(
    batch: Batch, instructions: InstructionSet, sliding_window: int | None, soft_cap: float | None, has_sinks: bool
) -> Tensor:
    return same_case(batch, instructions).expected(sliding_window, soft_cap, SINKS if has_sinks else None)


def check(
    batch: Batch,
    instructions: InstructionSet,
    sliding_window: int | None,
    soft_cap: float | None = None,
    has_sinks: bool = False,
) -> None:
    """What is expected is computed once for all numbers of threads, and for all instructions of a dtype."""
    case = same_case(batch, instructions)
    actual = case.run(instructions, sliding_window, soft_cap, SINKS if has_sinks else None)
    assert_close(actual, expected_of(batch, of_dtype(instructions), sliding_window, soft_cap, has_sinks))


@pytest.fixture(params=INSTRUCTION_SETS, ids=lambda each: each.name)
def instructions(request):
    return request.param


@pytest.fixture(params=[1, 3], ids=["one-thread", "three-threads"])
def _threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("sliding_window", [None, 1, 40, 1000])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
def test_batches(batch, sliding_window, instructions):
    check(batch, instructions, sliding_window)


@pytest.mark.parametrize("block_size", [4, 8, 16, 32, 64])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_sizes(heads, block_size, instructions):
    prefixed = Batch((1, 40, 3, 1), (200, 140, 131, 130), ("abcdefgh", "abcdefgh", "abcdABCD", ""))
    case = same_case(prefixed, instructions, heads, block_size)
    assert_close(case.run(instructions), case.expected())
    assert_close(case.run(instructions, sliding_window=50), case.expected(50))


@pytest.mark.parametrize("heads", [(3, 1, 24), (8, 1, 72)], ids=str)
def test_head_sizes_in_eights(heads, instructions):
    if instructions >= InstructionSet.AVX512_BF16:
        pytest.skip("bfloat16 wants sixteens")
    case = same_case(BATCHES["mixed"], instructions, heads)
    assert_close(case.run(instructions), case.expected())


@pytest.mark.parametrize("num_heads", range(1, 9))
def test_groups_of_heads(num_heads, instructions):
    case = same_case(BATCHES["mixed"], instructions, (2 * num_heads, 2, 32))
    assert_close(case.run(instructions), case.expected())


@pytest.mark.parametrize("soft_cap", [0.5, 5.0, 50.0])
@pytest.mark.parametrize("sliding_window", [None, 40])
def test_soft_cap(soft_cap, sliding_window, instructions):
    case = same_case(BATCHES["mixed"], instructions)
    assert_close(case.run(instructions, sliding_window, soft_cap), case.expected(sliding_window, soft_cap))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("batch", [*BATCHES.values(), Batch((1, 2), (5000, 4500))], ids=[*BATCHES, "long"])
def test_sinks(batch, soft_cap, instructions):
    for window in (None, 40):
        check(batch, instructions, window, soft_cap, has_sinks=True)


@pytest.mark.usefixtures("_threads")
def test_a_long_context_divided_among_threads(instructions):
    case = Case.build(Batch((1, 2), (5000, 4500)), instructions, (3, 1, 64))
    assert_close(case.run(instructions), case.expected())
    assert_close(case.run(instructions, sliding_window=3000), case.expected(3000))


def test_what_is_not_finite_stays_with_its_sequence(instructions):
    """A sequence whose keys and values are NaN, among others that share its tiles, and one of infinities."""
    case = Case.build(Batch((3, 9, 1, 1, 30, 1), (40, 70, 33, 90, 30, 17)), instructions)
    expected = case.expected()
    for index, value in ((1, math.nan), (3, math.inf)):
        blocks = list(case.metadata.block_tables[index])
        case.key_cache[blocks] = case.value_cache[blocks] = value
    actual, starts = case.run(instructions), numpy.cumsum([0, 3, 9, 1, 1, 30, 1])
    for index in (0, 2, 4, 5):
        tokens = slice(starts[index], starts[index + 1])
        assert_close(actual[tokens], expected[tokens])
    assert actual[starts[1] : starts[2]].isnan().all()


@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("side", ["query", "key_cache"])
def test_a_score_that_is_nan_makes_what_sees_it_nan(side, soft_cap, instructions):
    """So that the row is known to have failed, and gets no token of chance."""
    case = Case.build(Batch((1, 20), (50, 90)), instructions)
    if side == "query":
        case.query[:] = math.nan
    else:
        case.key_cache[[table[0] for table in case.metadata.block_tables], 3] = math.nan
    assert case.run(instructions, soft_cap=soft_cap).isnan().all()


def test_the_weights_of_many_keys_add_up_to_one(instructions):
    """Equal scores, whose largest never changes, over many chunks."""
    case = Case.build(Batch((1, 9), (12_000, 12_000)), instructions, (2, 1, 32))
    case.query.zero_()
    case.value_cache.nan_to_num_(0).fill_(1)
    assert_close(case.run(instructions), torch.ones_like(case.query))


@pytest.mark.parametrize("factor", [4, 64])
def test_large_scores(factor, instructions):
    """Later keys' exceed the first ones' by a little, or by so much that their exponentials are beyond any float."""
    case = same_case(BATCHES["mixed"], instructions)
    larger = replace(case, query=case.query * factor)
    # What a score is rounded by grows with it.
    tolerance = max(TOLERANCES[larger.query.dtype], factor * 1e-6)
    torch.testing.assert_close(larger.run(instructions), larger.expected(), rtol=tolerance, atol=tolerance)


def test_blocks_that_slid_out_of_the_window_are_not_read(instructions):
    """Their places in the table hold a block that is not theirs, and holds anything."""
    case = Case.build(Batch((1, 3, 20), (300, 200, 250)), instructions, block_size=8)
    expected = case.expected(sliding_window=60)
    lens = zip(case.metadata.query_lens, case.metadata.context_lens, strict=True)
    freed = [max(0, context - query + 1 - 60) // 8 for query, context in lens]
    used = set().union(*case.metadata.block_tables)
    other = next(block for block in range(len(case.key_cache)) if block not in used)
    tables = [
        [other] * count + list(table[count:]) for count, table in zip(freed, case.metadata.block_tables, strict=True)
    ]
    slid = replace(case, metadata=replace(case.metadata, block_tables=tables))
    assert_close(slid.run(instructions, 60), expected)


def test_queries_and_caches_may_be_parts_of_larger_tensors(instructions):
    case = same_case(BATCHES["mixed"], instructions)
    wide = torch.zeros(case.query.shape[0], 15, 64, dtype=case.query.dtype)
    wide[:, 2:11] = case.query
    caches = torch.zeros(*case.key_cache.shape[:3], 2, 64, dtype=case.query.dtype)
    caches[..., 0, :], caches[..., 1, :] = case.key_cache, case.value_cache
    part = Case(wide[:, 2:11], caches[..., 0, :], caches[..., 1, :], case.metadata)
    assert torch.equal(part.run(instructions), case.run(instructions))


def test_a_batch_of_nothing(instructions):
    case = Case.build(BATCHES["one-token"], instructions)
    empty = replace(case, query=case.query[:0], metadata=AttentionMetadata([], [], [], 16))
    assert empty.run().shape == (0, 9, 64)


@pytest.mark.parametrize(
    "change",
    [
        lambda case: {"query": case.query.half()},
        lambda case: {"query": case.query.mT.contiguous().mT},
        lambda case: {"value_cache": case.value_cache.repeat_interleave(2, dim=2)[:, :, ::2]},
    ],
    ids=["float16", "transposed", "caches-of-two-layouts"],
)
def test_what_it_does_not_take(change, instructions):
    case = Case.build(BATCHES["one-token"], instructions)
    assert takes_native(case.query, case.key_cache, case.value_cache, case.scale)
    other = replace(case, **change(case))
    assert not takes_native(other.query, other.key_cache, other.value_cache, other.scale)


@pytest.mark.parametrize(("head_dim", "block_size"), [(20, 16), (544, 16), (64, 12)])
def test_sizes_that_it_does_not_take(head_dim, block_size):
    for dtype in (torch.float32, torch.bfloat16):
        query, cache = (torch.zeros(size, dtype=dtype) for size in ((1, 2, head_dim), (4, block_size, 2, head_dim)))
        assert not takes_native(query, cache, cache, 1.0)


def test_layout_puts_sequences_with_equal_beginnings_side_by_side():
    tables = [[7, 8, 9], [300, 2], [7, 8, 4], [7, 8, 9, 1, 5], [300, 2, 6]]
    layout = NativeLayout.build(BatchLayout([1, 2, 1, 3, 1], [12, 7, 9, 16, 9], tables, 4))
    assert layout.query_starts.tolist() == [0, 1, 3, 4, 7, 8]
    assert layout.block_tables.tolist() == [[7, 8, 9, 0], [300, 2, 0, 0], [7, 8, 4, 0], [7, 8, 9, 1], [300, 2, 6, 0]]
    assert layout.order.tolist() == [2, 0, 3, 1, 4]
    assert layout.shared_blocks.tolist() == [0, 2, 3, 0, 2]
    assert {array.dtype for array in vars(layout).values()} == {numpy.dtype("int32")}
