"""The emulated GPU's tensor cores: the manual's layouts are written down here once more, an element at a time."""

from contextlib import nullcontext

import pytest
import torch

from .ptx.conflicts import ConflictError
from .ptx.snippets import emulate, into_shared


def small(*shape: int) -> torch.Tensor:
    """Whole numbers, whose products are exact."""
    return torch.randint(-8, 9, shape).float()


@pytest.mark.parametrize("is_transposed", [False, True])
def test_matrices_go_to_registers_and_back(is_transposed):
    """A lane has two numbers of a row, or of a column: PTX ISA, 9.7.14.5.15."""
    matrices = torch.arange(256, dtype=torch.int16).view(4, 8, 8)
    suffix = ".trans" if is_transposed else ""
    held, back = torch.zeros(32, 8, dtype=torch.int16), torch.zeros(32, 8, dtype=torch.int16)
    body = f"""
        {into_shared(16)}
        ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{%r4, %r5, %r6, %r7}}, [%r2];
        st.global.v4.b32 [%a1], {{%r4, %r5, %r6, %r7}};
        stmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 [%r2+512], {{%r7, %r6, %r5, %r4}};
        ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r2+512]; st.global.v4.b32 [%a2], {{%r4, %r5, %r6, %r7}};
    """
    emulate(body, matrices.view(32, 8), held, back, shared_bytes=1024)
    for lane in range(32):
        for matrix in range(4):
            for place in range(2):
                row, column = lane // 4, 2 * (lane % 4) + place
                row, column = (column, row) if is_transposed else (row, column)
                assert held[lane, 2 * matrix + place] == matrices[matrix, row, column]
    assert torch.equal(back.view(4, 8, 8), matrices.flip(0))


def warp_registers(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Factors [16, 16] and [16, 8] as lanes have them: a0 to a7, b0 to b3 of PTX ISA, 9.7.14.5.8."""
    registers = torch.zeros(32, 12, dtype=a.dtype)
    for lane in range(32):
        group, in_group = lane // 4, lane % 4
        for i in range(8):
            row = group if i < 2 or 4 <= i < 6 else group + 8
            registers[lane, i] = a[row, in_group * 2 + (i & 1) + (0 if i < 4 else 8)]
        for i in range(4):
            registers[lane, 8 + i] = b[in_group * 2 + (i & 1) + (0 if i < 2 else 8), group]
    return registers


def result_of(lanes: torch.Tensor) -> torch.Tensor:
    """[16, columns] of the numbers that 32 lanes have: c0 to c3 of PTX ISA, 9.7.14.5.8, and so on by columns."""
    result = torch.zeros(16, 2 * lanes.shape[1])
    for lane in range(32):
        for i in range(lanes.shape[1]):
            row = lane // 4 if i % 4 < 2 else lane // 4 + 8
            result[row, i // 4 * 8 + lane % 4 * 2 + (i & 1)] = lanes[lane, i]
    return result


@pytest.mark.parametrize(("kind", "dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_a_product_of_a_warp(kind, dtype):
    a, b, sums = small(16, 16), small(16, 8), torch.zeros(32, 4)
    body = f"""
        ld.global.v2.b32 {{%r4, %r5}}, [%a0]; ld.global.v2.b32 {{%r6, %r7}}, [%a0+8];
        ld.global.v2.b32 {{%r8, %r9}}, [%a0+16]; mov.b32 %r10, 0f3F800000;
        mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32
            {{%r11, %r12, %r13, %r14}}, {{%r4, %r5, %r6, %r7}}, {{%r8, %r9}}, {{%r10, %r10, %r10, %r10}};
        st.global.v4.b32 [%a1], {{%r11, %r12, %r13, %r14}};
    """
    emulate(body, warp_registers(a, b).to(dtype), sums)
    assert torch.equal(result_of(sums), a @ b + 1)


def test_a_product_of_bytes_ends_at_the_largest_sum():
    """A lane has four numbers of a row or column, and four that are 16 on: PTX ISA, 9.7.14.5.10."""
    a, b = torch.randint(-128, 128, (16, 32)), torch.randint(-128, 128, (32, 8))
    registers, sums = torch.zeros(32, 24, dtype=torch.int8), torch.zeros(32, 8, dtype=torch.int32)
    for lane in range(32):
        group, in_group = lane // 4, lane % 4
        for i in range(16):
            row = group if i < 4 or 8 <= i < 12 else group + 8
            registers[lane, i] = a[row, in_group * 4 + (i & 3) + (0 if i < 8 else 16)]
        for i in range(8):
            registers[lane, 16 + i] = b[in_group * 4 + (i & 3) + (0 if i < 4 else 16), group]
    product = "mma.sync.aligned.m16n8k32.row.col{}.s32.s8.s8.s32 {{{}}}, {{%r4, %r5, %r6, %r7}}, {{%r8, %r9}}, {{{}}};"
    body = f"""
        ld.global.v2.b32 {{%r4, %r5}}, [%a0]; ld.global.v2.b32 {{%r6, %r7}}, [%a0+8];
        ld.global.v2.b32 {{%r8, %r9}}, [%a0+16]; mov.b32 %r10, 0; mov.b32 %r11, 0x7FFFFFFF;
        {product.format("", "%r12, %r13, %r14, %r15", ", ".join(["%r10"] * 4))}
        {product.format(".satfinite", "%r16, %r17, %r18, %r19", ", ".join(["%r11"] * 4))}
        st.global.v4.b32 [%a1], {{%r12, %r13, %r14, %r15}}; st.global.v4.b32 [%a1+16], {{%r16, %r17, %r18, %r19}};
    """
    emulate(body, registers, sums)
    assert torch.equal(result_of(sums[:, :4]), (a @ b).float())
    limited = (a @ b + 2**31 - 1).clamp(max=2**31 - 1)
    assert torch.equal(result_of(sums[:, 4:]), limited.float())


# By how many 16 bytes apart a row's blocks lie, by the row: PTX ISA, 9.7.15.5.1, figures of the swizzling modes.
SWIZZLES = {128: (1, lambda row: row % 8), 64: (2, lambda row: row // 2 % 4), 32: (3, lambda row: row // 4 % 2)}
BLOCK_ROWS = 8
FACTOR_BYTES = 16384


def place_of(span: int, row: int, offset: int) -> int:
    """Of a byte of a row of `span` bytes, within rows that lie beside each other."""
    _, exchanged = SWIZZLES[span]
    return row * span + (offset // 16 ^ exchanged(row)) * 16 + offset % 16


def in_memory(matrix: torch.Tensor, span: int, is_transposed: bool) -> torch.Tensor:
    """A factor [rows, depth] where a descriptor finds it: 8 rows together; transposed, 8 of its depth."""
    memory = torch.full((FACTOR_BYTES // 2,), torch.nan).to(matrix.dtype)
    for row in range(matrix.shape[0]):
        for depth in range(matrix.shape[1]):
            if is_transposed:
                # Spans of rows lie apart by the leading offset, eights of depth by the stride.
                block = row * 2 // span * LEADING + depth // BLOCK_ROWS * BLOCK_ROWS * span
                place = block + place_of(span, depth % BLOCK_ROWS, row * 2 % span)
            else:
                place = place_of(span, row, depth * 2)
            memory[place // 2] = matrix[row, depth]
    return memory


LEADING = 4096


def descriptor(start: int, span: int) -> int:
    """PTX ISA, 9.7.15.5.1.2: start, leading offset, stride and mode of swizzling."""
    mode, _ = SWIZZLES[span]
    return start >> 4 | LEADING >> 4 << 16 | BLOCK_ROWS * span >> 4 << 32 | mode << 62


def warpgroup_product(left: str, steps: list[tuple[int, int]], end: str, flags: str = "0, 0") -> str:
    """b's descriptor is in `%rd1`; 64 columns, whose sums are in `%r40` to `%r71`."""
    sums = ", ".join(f"%r{40 + index}" for index in range(32))
    zeros = "".join(f"mov.b32 %r{40 + index}, 0;" for index in range(32))
    products = "".join(
        f"add.s64 %rd2, %rd0, {a_step}; add.s64 %rd3, %rd1, {b_step};"
        f"wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{sums}}}, {left}, %rd3, 1, 1, 1, {flags};"
        for a_step, b_step in steps
    )
    stores = "".join(f"st.global.b32 [%a1+{4 * index}], %r{40 + index};" for index in range(32))
    return f"{zeros} wgmma.fence.sync.aligned; {products} wgmma.commit_group.sync.aligned; {end} {stores}"


WAIT = "wgmma.wait_group.sync.aligned 0;"


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("span", [128, 64, 32])
def test_a_product_of_a_warpgroup(span, is_transposed):
    """Both factors in shared memory, as deep as a span, a step after another within it."""
    depth = span // 2
    a, b = small(64, depth), small(64, depth)
    memory = torch.cat((in_memory(a.bfloat16(), span, False), in_memory(b.bfloat16(), span, is_transposed)))
    # 16 of its depth are 32 bytes of a row; transposed, two blocks of rows.
    b_step = 2 * BLOCK_ROWS * span if is_transposed else 32
    steps = [(step * 32 >> 4, step * b_step >> 4) for step in range(depth // 16)]
    product = warpgroup_product("%rd2", steps, WAIT, f"0, {int(is_transposed)}")
    row_bytes = 2 * FACTOR_BYTES // 128
    body = f"""
        {into_shared(row_bytes)}
        mov.b64 %rd0, {descriptor(0, span)}; mov.b64 %rd1, {descriptor(FACTOR_BYTES, span)}; {product}
    """
    sums = torch.zeros(128, 32)
    emulate(body, memory.view(128, -1), sums, num_threads=128, shared_bytes=2 * FACTOR_BYTES)
    assert torch.equal(torch.cat([result_of(warp) for warp in sums.view(4, 32, 32)]), a @ b.T)


@pytest.mark.parametrize(
    ("end", "is_late"),
    [(WAIT + "st.shared.b32 [%r2], 0;", False), ("st.shared.b32 [%r2], 0; bar.sync 0;" + WAIT, True)],
    ids=["waited for", "overwritten before"],
)
def test_a_factor_in_registers_and_one_that_must_stay(end, is_late):
    """What is overwritten before the product was waited for is seen in it."""
    a, b = small(64, 16), small(64, 16)
    memory = in_memory(b.bfloat16(), 128, False)
    lanes = torch.stack([warp_registers(part, torch.zeros(16, 8))[:, :8] for part in a.view(4, 16, 16)])
    loads = "".join(f"ld.global.b32 %r{4 + index}, [%a2+{4 * index}];" for index in range(4))
    body = f"""
        {into_shared(FACTOR_BYTES // 128)} {loads} mov.b64 %rd0, 0; mov.b64 %rd1, {descriptor(0, 128)};
        {warpgroup_product("{%r4, %r5, %r6, %r7}", [(0, 0)], end, "0")}
    """
    sums = torch.zeros(128, 32)
    given = memory.view(128, -1), sums, lanes.view(128, 8).bfloat16()
    emulate(body, *given, num_threads=128, shared_bytes=FACTOR_BYTES)
    got = torch.cat([result_of(warp) for warp in sums.view(4, 32, 32)])
    assert torch.equal(got, a @ b.T) is not is_late


def test_a_factor_that_the_other_warps_may_not_have_written_yet():
    """A warpgroup reads what all of its warps have copied: there has to be a barrier between."""
    memory, lanes = torch.zeros(128, FACTOR_BYTES // 256), torch.zeros(128, 8).bfloat16()
    body = f"""
        {into_shared(FACTOR_BYTES // 128)} mov.b64 %rd0, 0; mov.b64 %rd1, {descriptor(0, 128)};
        {warpgroup_product("{%r0, %r0, %r0, %r0}", [(0, 0)], WAIT, "0")}
    """
    given = memory.bfloat16(), torch.zeros(128, 32), lanes
    emulate(body, *given, num_threads=128, shared_bytes=FACTOR_BYTES)
    with pytest.raises(ConflictError, match=r"warps of program 0 reads what warp . of program 0 wrote"):
        emulate(body.replace("bar.sync 0;", ""), *given, num_threads=128, shared_bytes=FACTOR_BYTES)


def test_of_two_products_the_first_is_waited_for_alone():
    """The other still reads its factor in registers, whose change is seen in it."""
    a, b = small(64, 16), small(64, 16)
    memory = in_memory(b.bfloat16(), 128, False)
    lanes = torch.stack([warp_registers(part, torch.zeros(16, 8))[:, :8] for part in a.view(4, 16, 16)])
    first, second = ("{" + ", ".join(f"%r{begin + index}" for index in range(32)) + "}" for begin in (40, 80))
    product = (
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {}, {}, %rd1, 0, 1, 1, 0; "
        "wgmma.commit_group.sync.aligned;"
    )
    loads = "".join(
        f"ld.global.b32 %r{4 + index}, [%a2+{4 * index}]; mov.b32 %r{8 + index}, %r{4 + index};" for index in range(4)
    )
    stores = "".join(
        f"st.global.b32 [%a1+{4 * index}], %r{40 + index}; st.global.b32 [%a1+{4 * index + 128}], %r{80 + index};"
        for index in range(32)
    )
    body = f"""
        {into_shared(FACTOR_BYTES // 128)} {loads} mov.b64 %rd1, {descriptor(0, 128)}; wgmma.fence.sync.aligned;
        {product.format(first, "{%r4, %r5, %r6, %r7}")} {product.format(second, "{%r8, %r9, %r10, %r11}")}
        wgmma.wait_group.sync.aligned 1; {"".join(f"mov.b32 %r{register}, 0;" for register in range(4, 12))}
        wgmma.wait_group.sync.aligned 0; {stores}
    """
    sums = torch.zeros(128, 64)
    emulate(body, memory.view(128, -1), sums, lanes.view(128, 8).bfloat16(), num_threads=128, shared_bytes=FACTOR_BYTES)
    got = [torch.cat([result_of(warp) for warp in each]) for each in sums.view(4, 32, 64).split(32, 2)]
    assert torch.equal(got[0], a @ b.T)
    assert not got[1].any()


@pytest.mark.parametrize("meet", ["bar.sync 1, 128;", ""])
def test_a_factor_is_free_once_all_four_warps_have_waited(meet):
    """One of them says so, for the others only after a barrier of the four."""
    body = f"""
        setp.eq.u32 %p1, %r0, 0; @%p1 mbarrier.init.shared::cta.b64 [{FACTOR_BYTES}], 32; shl.b32 %r2, %r0, 7;
        barrier.sync 2; setp.lt.u32 %p1, %r0, 128; @!%p1 bra $L__others;
        mov.b64 %rd0, 0; mov.b64 %rd1, {descriptor(0, 128)};
        {warpgroup_product("{%r0, %r0, %r0, %r0}", [(0, 0)], WAIT, "0")} {meet}
        setp.lt.u32 %p1, %r0, 32; @%p1 mbarrier.arrive.shared::cta.b64 _, [{FACTOR_BYTES}]; bra $L__end;
    $L__others:
    $L__wait:
        mbarrier.try_wait.parity.shared::cta.b64 %p2, [{FACTOR_BYTES}], 0; @!%p2 bra $L__wait;
        mov.u32 %r3, 5; st.shared.b32 [0], %r3;
    $L__end:
    """
    given = torch.zeros(256, 64), torch.zeros(256, 32)
    refused = pytest.raises(ConflictError, match=r"warp . of program 0 writes what warps of program 0 read")
    with nullcontext() if meet else refused:
        emulate(body, *given, num_threads=256, shared_bytes=FACTOR_BYTES + 8)
