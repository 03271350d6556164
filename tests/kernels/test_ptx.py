"""The emulated GPU's instructions, each against what the PTX manual says of it."""

import math
import re

import pytest
import torch

from .ptx.memory import IllegalAccessError
from .ptx.program import UnknownInstructionError
from .ptx.snippets import emulate
from .ptx.threads import DivergenceError


def mapped(body: str, *inputs: torch.Tensor, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """What `body` leaves in `%r9` of each thread, whose inputs are in `%r3`, `%r4` and `%r5`."""
    output = torch.zeros(len(inputs[0]), dtype=dtype)
    loads = "".join(f"ld.global.b32 %r{3 + index}, [%a{index}];" for index in range(len(inputs)))
    given = [each.contiguous() for each in inputs]
    emulate(f"{loads} {body} st.global.b32 [%a{len(inputs)}], %r9;", *given, output, num_threads=len(output))
    return output


def floats(*numbers: float) -> torch.Tensor:
    """As many as a warp has threads."""
    return torch.tensor([*numbers, *[0.0] * (32 - len(numbers))])


def integers(*numbers: int) -> torch.Tensor:
    return torch.tensor([*numbers, *[0] * (32 - len(numbers))], dtype=torch.int32)


def test_an_instruction_that_is_not_known_is_named():
    for text in (
        "tanh.approx.f32 %r4, %r3",
        "add.sat.s32 %r4, %r3, 1",
        "bar.red.popc.u32 %r9, 0, %p1",
        "cvt.rn.s32.f32 %r9, %r3",
        "shfl.sync.idx.b32 %r9, %r3, 0, 31, 1",
    ):
        with pytest.raises(UnknownInstructionError, match=re.escape(text)):
            mapped(f"{text};", floats())


@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_two_floats_are_rounded_into_one_register(kind):
    """To the nearest, ties to even; the first is the upper half."""
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[kind]
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11, -1e-7, 65520, 3e38, math.inf])
    x, y = torch.cat((ties, torch.randn(24))), torch.randn(32) * 100
    got = mapped(f"cvt.rn.{kind}x2.f32 %r9, %r3, %r4;", x, y).view(dtype).view(32, 2)
    assert torch.equal(got, torch.stack((y, x), 1).to(dtype))


def test_a_float_is_cut_to_a_half():
    x = floats(1 + 2**-11 + 2**-20, -1 - 2**-10 - 2**-11, 1e6, -math.inf, 2**-24 * 1.9)
    got = mapped("cvt.rz.f16.f32 %h1, %r3; cvt.u32.u16 %r9, %h1;", x).to(torch.int16).view(torch.float16)
    assert got[:5].tolist() == [1.0, -1 - 2**-10, 65504.0, -math.inf, 2**-24]


@pytest.mark.parametrize(("kind", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_bytes_are_rounded_and_limited_and_read_back(kind, dtype):
    largest = torch.finfo(dtype).max
    x = torch.cat((floats(1e6, -1e6, largest, math.inf, 17, 19, -1e-3)[:8], torch.randn(24) * 30))
    body = f"cvt.rn.satfinite.{kind}x2.f32 %h1, %r3, %r4; cvt.rn.f16x2.{kind}x2 %r9, %h1;"
    got = mapped(body, x, x * 0.3).view(torch.float16).view(32, 2)
    expected = torch.stack((x * 0.3, x), 1).clamp(-largest, largest).to(dtype).half()
    assert torch.equal(got, expected)
    assert mapped(body, floats(math.nan), floats()).view(torch.float16)[1].isnan()


def test_floats_become_the_nearest_integers_there_are():
    x = floats(2.5, 3.5, -2.5, -2.9, 1e10, -1e10, math.nan, math.inf)
    whole = {
        "rni.s32": [2, 4, -2, -3, 2**31 - 1, -(2**31), 0, 2**31 - 1],
        "rzi.s32": [2, 3, -2, -2, 2**31 - 1, -(2**31), 0, 2**31 - 1],
        "rmi.s32": [2, 3, -3, -3, 2**31 - 1, -(2**31), 0, 2**31 - 1],
        "rpi.s32": [3, 4, -2, -2, 2**31 - 1, -(2**31), 0, 2**31 - 1],
        "rzi.s16": [2, 3, -2, -2, 2**15 - 1, -(2**15), 0, 2**15 - 1],
    }
    for kind, expected in whole.items():
        assert mapped(f"cvt.{kind}.f32 %r9, %r3;", x)[:8].tolist() == expected, kind
    assert mapped("cvt.rpi.f32.f32 %r9, %r3;", x, dtype=torch.float32)[:4].tolist() == [3.0, 4.0, -2.0, -2.0]


def test_a_product_and_a_sum_are_rounded_once():
    x, y = torch.full((32,), 1 + 2**-12), torch.full((32,), -1 - 2**-11)
    assert mapped("fma.rn.f32 %r9, %r3, %r3, %r4;", x, y, dtype=torch.float32).tolist() == [2**-24] * 32
    body = "mul.rn.f32 %r9, %r3, %r3; add.rn.f32 %r9, %r9, %r4;"
    assert mapped(body, x, y, dtype=torch.float32).tolist() == [0.0] * 32
    # 2**-60 is below the last bit of the product in float64.
    x64, result = torch.full((32,), 1 + 2**-30, dtype=torch.float64), torch.zeros(32, dtype=torch.float64)
    body = "ld.global.b64 %rd0, [%a0]; fma.rn.f64 %rd1, %rd0, %rd0, 0dBFF0000000800000; st.global.b64 [%a1], %rd1;"
    emulate(body, x64, result)
    assert result.tolist() == [2**-60] * 32


def test_sums_of_pairs_are_rounded_to_bfloat16():
    x, y = torch.randn(32, 2).bfloat16(), torch.randn(32, 2).bfloat16()
    given = x.view(torch.int32).flatten(), y.view(torch.int32).flatten()
    for opcode, expected in (("add", x + y), ("mul", x * y), ("sub", x - y)):
        got = mapped(f"{opcode}.bf16x2 %r9, %r3, %r4;", *given)
        assert torch.equal(got.view(torch.bfloat16).view(32, 2), expected), opcode


def test_the_least_of_a_number_and_a_nan():
    x, y = floats(math.nan, 2.0, -3.0, -1.0), floats(1.0, math.nan, 2.0, -2.0)

    def least(modifiers: str) -> list[float]:
        return mapped(f"min.{modifiers}f32 %r9, %r3, %r4;", x, y, dtype=torch.float32)[:4].tolist()

    assert least("") == [1.0, 2.0, -3.0, -2.0]
    assert [math.isnan(each) for each in least("NaN.")] == [True, True, False, False]
    assert [abs(each) for each in least("xorsign.abs.")] == [1.0, 2.0, 2.0, 1.0]
    assert least("xorsign.abs.")[2:] == [-2.0, 1.0]
    assert [math.isnan(each) for each in least("NaN.xorsign.abs.")] == [True, True, False, False]


def test_a_comparison_with_a_nan():
    x, y = floats(math.nan, 1.0, 1.0, 2.0), floats(1.0, math.nan, 1.0, 1.0)
    expected = {"eq": [0, 0, 1, 0], "ne": [0, 0, 0, 1], "neu": [1, 1, 0, 1], "geu": [1, 1, 1, 1], "num": [0, 0, 1, 1]}
    for comparison, holds in expected.items():
        got = mapped(f"setp.{comparison}.f32 %p1, %r3, %r4; selp.b32 %r9, 1, 0, %p1;", x, y)
        assert got[:4].tolist() == holds, comparison


def test_division_is_towards_zero():
    x, y = integers(7, -7, 7, -7, -(2**31)), integers(2, 2, -2, -2, 1)
    y[5:] = 1
    assert mapped("div.s32 %r9, %r3, %r4;", x, y)[:5].tolist() == [3, -3, -3, 3, -(2**31)]
    assert mapped("rem.s32 %r9, %r3, %r4;", x, y)[:5].tolist() == [1, -1, 1, -1, 0]
    assert mapped("div.u32 %r9, %r3, %r4;", x, y)[:2].tolist() == [3, (2**32 - 7) // 2]


def test_bits_are_shifted_extracted_and_permuted():
    x = integers(-16, 0x76543210, -1)
    assert mapped("shr.s32 %r9, %r3, 40;", x)[:2].tolist() == [-1, 0]
    assert mapped("shr.u32 %r9, %r3, 40;", x)[:2].tolist() == [0, 0]
    assert mapped("shl.b32 %r9, %r3, 32;", x)[:2].tolist() == [0, 0]
    assert mapped("bfe.u32 %r9, %r3, 4, 8;", x)[:3].tolist() == [255, 0x21, 255]
    assert mapped("bfe.s32 %r9, %r3, 2, 3;", x)[:3].tolist() == [-4, -4, -1]
    assert mapped("bfe.s32 %r9, %r3, 28, 8;", x)[:2].tolist() == [-1, 7]
    assert mapped("shf.l.wrap.b32 %r9, 0xABCDEF01, %r3, 40;", x)[1].item() == 0x543210AB
    assert mapped("shf.r.clamp.b32 %r9, 0, %r3, 40;", x)[1].item() == 0x76543210
    assert mapped("shf.r.wrap.b32 %r9, 0, %r3, 40;", x)[1].item() == 0x10000000
    assert mapped("bfi.b32 %r9, %r3, -1, 8, 12;", x)[:2].tolist() == [-0xF01, -0xDEF01]
    assert mapped("bfi.b32 %r9, %r3, 0, 28, 8;", x)[:3].tolist() == [0, 0, -(2**28)]
    assert mapped("prmt.b32 %r9, %r3, 0x33221100, 0x7410U;", x)[1].item() == 0x33003210
    # A selector of 8 and more gives the byte's sign.
    assert mapped("prmt.b32 %r9, %r3, 0, 0x7b88U;", x)[:2].tolist() == [0x00FFFFFF, 0]


def test_products_have_their_upper_halves():
    x, y = integers(-3, 2**30), integers(5, 12)
    wide = "mul.wide.s32 %rd0, %r3, %r4; shr.s64 %rd0, %rd0, 16; cvt.u32.u64 %r9, %rd0;"
    assert mapped(wide, x, y)[:2].tolist() == [-1, 12 * 2**14]
    assert mapped("mul.hi.s32 %r9, %r3, %r4;", x, y)[:2].tolist() == [-1, 3]
    assert mapped("mul.hi.u32 %r9, %r3, %r4;", x, y)[:2].tolist() == [4, 3]


@pytest.mark.parametrize("clamp", [31, 0x181F])
def test_lanes_tell_each_other(clamp):
    """Of segments of 32 lanes and of 8; where there is no such lane, a lane has its own."""
    x = torch.arange(32, dtype=torch.int32) + 100
    size = 32 if clamp == 31 else 8
    wanted = {
        "bfly": lambda lane: lane ^ 3,
        "up": lambda lane: lane - 3 if lane % size >= 3 else lane,
        "down": lambda lane: lane + 3 if lane % size + 3 < size else lane,
        "idx": lambda lane: lane // size * size + 3,
    }
    for mode, other in wanted.items():
        # Upwards the clamp is the first lane.
        given = clamp & ~31 if mode == "up" else clamp
        got = mapped(f"shfl.sync.{mode}.b32 %r9, %r3, 3, {given}, -1;", x)
        assert got.tolist() == [100 + other(lane) for lane in range(32)], mode


def test_a_warp_is_reduced():
    x = torch.randperm(64, dtype=torch.int32) - 30
    for name, expected in (("max.s32", x.view(2, 32).amax(1)), ("add.s32", x.view(2, 32).sum(1))):
        got = mapped(f"redux.sync.{name} %r9, %r3, -1;", x)
        assert got.view(2, 32).eq(expected[:, None]).all(), name


LOOP = """
    mov.b32 %r9, 0;
$L__loop:
    setp.ge.s32 %p1, %r9, %r3;
    @%p1 bra $L__end;
    add.s32 %r9, %r9, 1;
    bra.uni $L__loop;
$L__end:
    bar.sync 0;
"""


def test_threads_that_went_apart_meet_again():
    turns = torch.arange(64, dtype=torch.int32) % 7
    assert torch.equal(mapped(LOOP, turns), turns)


def test_a_barrier_that_not_all_threads_come_to_is_refused():
    with pytest.raises(DivergenceError, match=re.escape("bar.sync 0")):
        mapped("setp.lt.s32 %p1, %r0, 40; @!%p1 bra $L__past; bar.sync 0;\n$L__past:\n", integers().repeat(2))


def test_who_has_returned_is_not_waited_for():
    output = torch.zeros(64, dtype=torch.int32)
    emulate("setp.ge.s32 %p1, %r0, 40; @%p1 ret; bar.sync 0; st.global.b32 [%a0], 1;", output, num_threads=64)
    assert output.tolist() == [1] * 40 + [0] * 24


def test_what_a_predicate_excludes_is_left_alone():
    """Its address may be anything."""
    x = torch.arange(32, dtype=torch.int32)
    body = "setp.lt.s32 %p1, %r0, 5; selp.b64 %rd0, %a0, 1, %p1; mov.b32 %r9, -1; @%p1 ld.global.b32 %r9, [%rd0];"
    assert mapped(body, x).tolist() == [0, 1, 2, 3, 4] + [-1] * 27


@pytest.mark.parametrize("address", ["%a0+2", "%a0+128", "%a0-128"])
def test_an_illegal_access_is_refused(address):
    with pytest.raises(IllegalAccessError):
        emulate(f"ld.global.b32 %r3, [{address}];", torch.zeros(32))


@pytest.mark.parametrize(
    "access", ["ld.shared.b32 %r3, [2]", "st.shared.b32 [64], 0", "ld.shared.v4.b32 {%r3, %r4, %r5, %r6}, [8]"]
)
def test_so_is_one_in_shared_memory(access):
    with pytest.raises(IllegalAccessError):
        emulate(f"{access};", shared_bytes=64)


def test_shared_memory_is_a_ctas_own_and_nan_at_first():
    x, before, after = torch.arange(256.0), torch.zeros(256), torch.zeros(256)
    body = """
        ld.global.b32 %r3, [%a0]; shl.b32 %r4, %r0, 2; xor.b32 %r5, %r4, 124;
        ld.shared.b32 %r6, [%r5]; st.global.b32 [%a1], %r6;
        st.shared.b32 [%r4], %r3; bar.sync 0; ld.shared.b32 %r6, [%r5]; st.global.b32 [%a2], %r6;
    """
    emulate(body, x, before, after, num_ctas=8, shared_bytes=128)
    assert before.isnan().all()
    assert torch.equal(after, x.view(8, 32).flip(1).flatten())


def test_a_copy_is_there_when_it_is_waited_for_and_not_before():
    """Until then its place holds NaN; of two groups the first may be waited for alone."""
    x, seen = torch.arange(64.0).view(32, 2), torch.zeros(32, 5)

    def read(place: int, index: int) -> str:
        return f"ld.shared.b32 %r3, [%r2+{place}]; st.global.b32 [%a1+{4 * index}], %r3;"

    begin = "cp.async.ca.shared.global [%r2+{0}], [%a0+{0}], 4; cp.async.commit_group;"
    body = f"""
        shl.b32 %r2, %r0, 3; st.shared.b32 [%r2], 0; {begin.format(0)} {begin.format(4)}
        {read(0, 0)} cp.async.wait_group 1; {read(0, 1)} {read(4, 2)} cp.async.wait_group 0; {read(4, 3)} {read(0, 4)}
    """
    emulate(body, x, seen, shared_bytes=256)
    assert seen[:, [0, 2]].isnan().all()
    assert torch.equal(seen[:, [1, 3, 4]], x[:, [0, 1, 0]])


def test_what_a_copy_does_not_read_is_zero():
    x, seen = torch.ones(32, 4), torch.ones(32, 4)
    sizes = torch.arange(32, dtype=torch.int32) % 3 * 8
    body = """
        shl.b32 %r2, %r0, 4; ld.global.b32 %r3, [%a1]; cp.async.cg.shared.global [%r2], [%a0], 16, %r3;
        cp.async.commit_group; cp.async.wait_group 0;
        ld.shared.v4.b32 {%r4, %r5, %r6, %r7}, [%r2]; st.global.v4.b32 [%a2], {%r4, %r5, %r6, %r7};
    """
    emulate(body, x, sizes, seen, shared_bytes=512)
    assert torch.equal(seen.sum(1), sizes / 4)


def test_no_addition_in_memory_is_lost():
    total, before = torch.zeros(1, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    body = "ld.param.b64 %rd0, [snippet_param_0]; {}"
    add = "atom.global.add.u32 %r3, [%rd0], 2; st.global.b32 [%a1], %r3;"
    emulate(body.format(add), total.expand(64), before, num_ctas=2)
    assert total.item() == 128
    assert sorted(before.tolist()) == list(range(0, 128, 2))
    emulate(body.format("red.global.max.s32 [%rd0], %r0;"), total, num_threads=256)
    assert total.item() == 255


def test_one_of_two_arguments_is_chosen_by_its_address():
    one, other, got = torch.full((32,), 1), torch.full((32,), 2), torch.zeros(32, dtype=torch.int64)
    body = """
        mov.b64 %rd0, snippet_param_0; mov.b64 %rd1, snippet_param_1; setp.lt.s32 %p1, %r0, 7;
        selp.b64 %rd2, %rd0, %rd1, %p1; ld.param.b64 %rd3, [%rd2];
        ld.global.b64 %rd3, [%rd3]; st.global.b64 [%a2], %rd3;
    """
    emulate(body, one, other, got)
    assert got.tolist() == [1] * 7 + [2] * 25
