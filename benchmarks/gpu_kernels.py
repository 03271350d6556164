"""Attention's figures for `gpu.py`, and what the device can do: its kernels against that, or against torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from gpu_device import Timing, timing
from gpu_table import Line
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from headrace.kernels.paged_attention import AttentionMetadata, paged_attention_reference
from headrace.kernels.paged_attention.attention_shape import AttentionShape
from headrace.kernels.paged_attention.device_plan import LAUNCHES, DevicePlan
from headrace.kernels.paged_attention.planning import plan_attention
from headrace.kernels.paged_attention.prefix_groups import Gate
from headrace.kernels.paged_attention.static_plans import StaticPlans
from headrace.kernels.paged_attention.triton import attend_planned

BLOCK_SIZE = 16
_LAUNCH_TITLES = {"wide": "the prefix", "narrow": "own tokens", "merge_tokens": "merging"}


@dataclass(frozen=True)
class Sizes:
    """How large everything is: as published for Llama-3-8B on a GPU, or just enough to run on a CPU.

    prefixes: how many tokens are shared, each with how many times as fast as plain attention that is to be.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    prefixes: dict[int, float]
    own_tokens: int
    decode_batch: int
    decode_context: int
    prefill_tokens: int
    groups: int
    hidden: int
    inner: int
    linear_rows: tuple[int, ...]
    small_rows: tuple[int, ...]
    vocab: int
    copy_bytes: int
    matrix: int
    rounds: int

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(self.heads, self.kv_heads, self.head_dim, self.dtype)

    @property
    def kv_bytes(self) -> int:
        """Bytes of a token's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.dtype.itemsize


GPU = Sizes(
    torch.device("cuda"), torch.bfloat16, 32, 8, 128, batch=256, prefixes={2048: 4.0, 8192: 8.0}, own_tokens=128,
    decode_batch=32, decode_context=4096, prefill_tokens=8192, groups=8, hidden=4096, vocab=128256,
    inner=14336, linear_rows=(1, 16, 64, 256, 8192), small_rows=(256, 8192),
    copy_bytes=4 * 2**30, matrix=8192, rounds=20,
)  # fmt: skip
DRY = Sizes(
    torch.device("cpu"), torch.float32, 4, 2, 64, batch=4, prefixes={64: 4.0}, own_tokens=8,
    decode_batch=2, decode_context=100, prefill_tokens=40, groups=2, hidden=64, vocab=500,
    inner=256, linear_rows=(3,), small_rows=(2,),
    copy_bytes=2**20, matrix=64, rounds=1,
)  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What the device was measured to do: bytes copied (read and written) and products, per second."""

    bytes_per_second: float
    flops_per_second: float


def timed(call: Callable[[], object], sizes: Sizes) -> Timing:
    return timing(call, sizes.device, sizes.rounds)


def seconds(call: Callable[[], object], sizes: Sizes) -> float:
    """Median time of a call; see `timing`."""
    taken: float = timed(call, sizes).median
    return taken


def limit_lines(sizes: Sizes) -> tuple[Limits, list[Line]]:
    # Random: a GPU multiplies and moves zeros faster.
    source = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=sizes.device).random_()
    destination = torch.empty_like(source)
    # A captured copy was seen to be a third slower on an H200 than one that is not.
    copy = timing(lambda: destination.copy_(source), sizes.device, sizes.rounds, is_captured=False)
    a, b = torch.randn(2, sizes.matrix, sizes.matrix, device=sizes.device).to(sizes.dtype)
    product = timed(lambda: a @ b, sizes)
    limits = Limits(2 * sizes.copy_bytes / copy.median, 2 * sizes.matrix**3 / product.median)
    return limits, [
        Line("bytes copied, read and written", limits.bytes_per_second / 1e12, "TB/s", spread=copy.spread),
        Line(f"product of {sizes.matrix}²", limits.flops_per_second / 1e12, "TFLOP/s", spread=product.spread),
    ]


@dataclass(frozen=True)
class AttentionCase:
    """One layer's queries and cache, and where each sequence's blocks are."""

    query: Tensor
    caches: Tensor
    metadata: AttentionMetadata

    @classmethod
    def build(cls, sizes: Sizes, query_lens: list[int], contexts: list[int], prefixes: list[range]) -> "AttentionCase":
        """`prefixes[i]`: the blocks that sequence i begins with; its own follow."""
        fresh = max((blocks.stop for blocks in prefixes), default=0)
        tables = []
        for context, prefix in zip(contexts, prefixes, strict=True):
            own = -(-context // BLOCK_SIZE) - len(prefix)
            tables.append([*prefix, *range(fresh, fresh + own)])
            fresh += own
        metadata = AttentionMetadata(query_lens, contexts, tables, BLOCK_SIZE, sizes.device)
        generator = torch.Generator(sizes.device).manual_seed(0)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=sizes.device, dtype=sizes.dtype)

        query = randn(sum(query_lens), sizes.heads, sizes.head_dim)
        return cls(query, randn(2, fresh, BLOCK_SIZE, sizes.kv_heads, sizes.head_dim), metadata)

    @classmethod
    def decode(cls, sizes: Sizes, prefix: int, groups: int = 1) -> "AttentionCase":
        """`sizes.batch` sequences with one new token each, in groups that share a prefix of their own."""
        per_group = prefix // BLOCK_SIZE
        prefixes = [range(index % groups * per_group, (index % groups + 1) * per_group) for index in range(sizes.batch)]
        return cls.build(sizes, [1] * sizes.batch, [prefix + sizes.own_tokens] * sizes.batch, prefixes)

    def in_fp8(self) -> "AttentionCase":
        """The same with its keys and values in 8 bits."""
        return AttentionCase(self.query, self.caches.to(torch.float8_e4m3fn), self.metadata)

    def runner(self, sizes: Sizes, gate: Gate) -> tuple[Callable[[], object], Tensor]:
        """A call that attends, and the tensor it fills."""
        plan = plan_attention(self.metadata, sizes.attention, None, gate)
        return self._calling(sizes, DevicePlan.holding(plan, sizes.heads, sizes.head_dim, sizes.device))

    def runners_alone(self, sizes: Sizes, gate: Gate) -> dict[str, Callable[[], object]]:
        """Of what `runner` launches, each by itself."""
        plan = plan_attention(self.metadata, sizes.attention, None, gate)
        held = DevicePlan.holding(plan, sizes.heads, sizes.head_dim, sizes.device)
        launches = [name for name in LAUNCHES if name in held.launches]
        return {name: self._calling(sizes, held.launching(frozenset((name,))))[0] for name in launches}

    def engine_runner(self, sizes: Sizes) -> tuple[Callable[[], object], Tensor]:
        """As `runner`, with what the engine's CUDA graphs read: a plan of what its own gate says, in memory that has
        room for any step's.
        """
        key, num_tokens = (sizes.attention, None), len(self.query)
        longest = max(len(table) for table in self.metadata.block_tables)
        plans = StaticPlans([key], num_tokens, longest, BLOCK_SIZE, sizes.device)
        launches = plans.load(self.metadata)
        return self._calling(sizes, plans.metadata(num_tokens, launches).device_plans[key])

    def _calling(self, sizes: Sizes, held: DevicePlan) -> tuple[Callable[[], object], Tensor]:
        output = torch.full_like(self.query, torch.nan)
        scale = sizes.head_dim**-0.5
        keys, values = self.caches
        return lambda: attend_planned(self.query, keys, values, held, scale, output), output


def always(num_sequences: int, num_tokens: int) -> bool:
    return True


def never(num_sequences: int, num_tokens: int) -> bool:
    return False


def assert_near(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """Each vector of the last dimension by itself, its error's length beside its own. Raises `AssertionError`.

    Not number by number: over thousands of keys all are as small as the tolerance of one is large.
    """
    lengths = (expected.float().norm(dim=-1), (found.float() - expected.float()).norm(dim=-1))
    worst = float((lengths[1] / lengths[0]).max())
    assert worst <= tolerance, f"{tuple(found.shape)} is off by {worst:.2g}, and may be by {tolerance:g}"


def tolerance_of(sizes: Sizes) -> float:
    return 2e-2 if sizes.dtype == torch.bfloat16 else 2e-5


def check_attention(sizes: Sizes) -> None:
    """A mixed batch, shared and not, against the reference: long enough for loops to come into their stride.

    Raises `AssertionError`.
    """
    context = sizes.decode_context
    prefix, nothing = range(context // (2 * BLOCK_SIZE)), range(0)
    shared = len(prefix) * BLOCK_SIZE
    case = AttentionCase.build(
        sizes,
        [1, 1, 9, 40, 1, 40],
        [shared + 6, shared + 1, shared + 26, 40, context, context],
        [prefix, prefix, prefix, nothing, nothing, nothing],
    )
    in_fp8 = case.in_fp8()
    for held, run, output in (
        (case, *case.runner(sizes, never)),
        (case, *case.runner(sizes, always)),
        (case, *case.engine_runner(sizes)),
        (in_fp8, *in_fp8.runner(sizes, always)),
    ):
        keys, values = held.caches
        expected = paged_attention_reference(held.query, keys, values, held.metadata, sizes.head_dim**-0.5)
        run()
        assert_near(output, expected, tolerance_of(sizes))


def attention_lines(sizes: Sizes, limits: Limits) -> Iterator[Line]:
    for prefix, goal in sizes.prefixes.items():
        yield from _shared_lines(sizes, limits, prefix, goal)
    yield from _plain_decode_lines(sizes, limits)
    yield from _prefill_lines(sizes, limits)


def _shared_lines(sizes: Sizes, limits: Limits, prefix: int, goal: float) -> Iterator[Line]:
    case = AttentionCase.decode(sizes, prefix)
    plain = timed(case.runner(sizes, never)[0], sizes)
    name = f"decode, {sizes.batch} rows, {prefix} shared: plain paged"
    yield Line(name, plain.median * 1e3, "ms", spread=plain.spread)
    shared = timed(case.runner(sizes, always)[0], sizes)
    floor, value = _decode_floor(sizes, limits, prefix, groups=1), shared.median * 1e3
    yield Line(
        "  shared: times as fast as plain", value, "ms", plain.median / shared.median, goal, 1, spread=shared.spread
    )
    yield Line("  shared: fraction of the roofline", value, "ms", floor / shared.median, 0.75, 1, floor * 1e3)
    for launch, call in case.runners_alone(sizes, always).items():
        alone = timed(call, sizes)
        title = f"  {_LAUNCH_TITLES[launch]} alone: of the three together"
        yield Line(title, alone.median * 1e3, "ms", alone.median / shared.median, spread=alone.spread)
    of_engine = timed(case.engine_runner(sizes)[0], sizes)
    name = "  as the engine's graphs run it: of that speed"
    yield Line(name, of_engine.median * 1e3, "ms", shared.median / of_engine.median, spread=of_engine.spread)
    grouped = timed(AttentionCase.decode(sizes, prefix, sizes.groups).engine_runner(sizes)[0], sizes)
    least, speed = _decode_floor(sizes, limits, prefix, sizes.groups), of_engine.median / grouped.median
    name = f"  {sizes.groups} groups, so too: speed of one's"
    yield Line(name, grouped.median * 1e3, "ms", speed, 0.85, 2, least * 1e3, grouped.spread)
    yield Line(f"  {sizes.groups} groups: fraction of the roofline", grouped.median * 1e3, "ms", least / grouped.median)


def _decode_floor(sizes: Sizes, limits: Limits, prefix: int, groups: int) -> float:
    num_bytes = sizes.kv_bytes * (groups * prefix + sizes.batch * sizes.own_tokens)
    flops = 4 * sizes.heads * sizes.head_dim * sizes.batch * (prefix + sizes.own_tokens)
    return max(num_bytes / limits.bytes_per_second, flops / limits.flops_per_second)


def _plain_decode_lines(sizes: Sizes, limits: Limits) -> Iterator[Line]:
    rows, context, limit = sizes.decode_batch, sizes.decode_context, limits.bytes_per_second
    case = AttentionCase.build(sizes, [1] * rows, [context] * rows, [range(0)] * rows)
    taken = timed(case.runner(sizes, never)[0], sizes)
    rate = sizes.kv_bytes * rows * context / taken.median
    name = f"decode, {rows} rows of {context}: fraction of copy bandwidth"
    yield Line(name, rate / 1e9, "GB/s", rate / limit, 0.9, 3, limit / 1e9, taken.spread)
    taken = timed(case.in_fp8().runner(sizes, never)[0], sizes)
    rate = sizes.kv_bytes / sizes.dtype.itemsize * rows * context / taken.median
    name = "  the same from an FP8 cache"
    yield Line(name, rate / 1e9, "GB/s", rate / limit, limit=limit / 1e9, spread=taken.spread)


def _prefill_lines(sizes: Sizes, limits: Limits) -> Iterator[Line]:
    line = _prefill_line(f"prefill of {sizes.prefill_tokens}", sizes)
    share = line.value * 1e12 / limits.flops_per_second
    yield Line("prefill: fraction of the matrix rate", line.value, "TFLOP/s", share)
    yield replace(line, goal=0.85, number=3)
    # As many numbers in half as many heads.
    larger = replace(sizes, heads=sizes.heads // 2, kv_heads=sizes.kv_heads // 2, head_dim=2 * sizes.head_dim)
    yield _prefill_line(f"  with heads of {larger.head_dim}", larger)


def _prefill_line(name: str, sizes: Sizes) -> Line:
    """Its speed, and how that compares with torch's best."""
    tokens = sizes.prefill_tokens
    case = AttentionCase.build(sizes, [tokens], [tokens], [range(0)])
    ours, rivals = timed(case.runner(sizes, never)[0], sizes), _sdpa_seconds(sizes, tokens)
    flops = 2 * sizes.heads * sizes.head_dim * tokens**2
    rate, best = flops / ours.median / 1e12, flops / min(rivals.values()) / 1e12
    name = f"{name}: speed of the best torch SDPA ({', '.join(rivals)})"
    return Line(name, rate, "TFLOP/s", rate / best, limit=best, spread=ours.spread)


def _sdpa_seconds(sizes: Sizes, tokens: int) -> dict[str, float]:
    """Of each of torch's ways that this machine has, with as few heads of keys as ours."""
    query, key, value = (
        torch.randn(1, heads, tokens, sizes.head_dim, device=sizes.device, dtype=sizes.dtype)
        for heads in (sizes.heads, sizes.kv_heads, sizes.kv_heads)
    )
    is_gpu = sizes.device.type == "cuda"
    times = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION) if is_gpu else (SDPBackend.MATH,):
        try:
            with sdpa_kernel(backend):
                taken = timed(
                    lambda: scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True), sizes
                )
        # One that is not built for this GPU says so when it is called.
        except RuntimeError as error:
            print(f"torch SDPA without {backend.name}: {' '.join(str(error).split())[:200]}", flush=True)
            continue
        times[backend.name.removesuffix("_ATTENTION").lower()] = taken.median
    return times
